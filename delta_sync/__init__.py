"""The shared core: what a delta is, how it is coded, proven and kept. Never imports torch, trl or vllm."""

from delta_sync.delta import apply, diff, fold, new_bits, raw
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, decode_delta, encode_delta
from delta_sync.digest import digest_change, digest_region, model_fingerprint, state_digest, tensor_key
from delta_sync.dtypes import DTYPES, DType, dtype
from delta_sync.errors import (
    ChainError,
    ConflictError,
    DeltaSyncError,
    FormatError,
    IntegrityError,
    MappingError,
    NotFoundError,
    ResetError,
    SignatureError,
    StoreError,
    SyncTimeoutError,
)
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.manifest import AnchorRecord, Manifest, ObjectRef, TensorState
from delta_sync.tensor_delta import TensorDelta

__all__ = [
    "DEFAULT_CODEC",
    "DEFAULT_LIMITS",
    "DTYPES",
    "AnchorRecord",
    "ChainError",
    "ConflictError",
    "DType",
    "DeltaHeader",
    "DeltaSyncError",
    "FormatError",
    "IntegrityError",
    "Limits",
    "Manifest",
    "MappingError",
    "NotFoundError",
    "ObjectRef",
    "ResetError",
    "SignatureError",
    "StoreError",
    "SyncTimeoutError",
    "TensorDelta",
    "TensorState",
    "apply",
    "decode_delta",
    "diff",
    "digest_change",
    "digest_region",
    "dtype",
    "encode_delta",
    "fold",
    "model_fingerprint",
    "new_bits",
    "raw",
    "state_digest",
    "tensor_key",
]
