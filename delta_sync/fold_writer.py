"""Attach to a version the deltas that lead to it from an older one, folded into one."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, encode_delta
from delta_sync.errors import ChainError
from delta_sync.manifest import FoldRecord, Manifest, ObjectRef, TensorState
from delta_sync.signing import sign
from delta_sync.store.base import Store
from delta_sync.store.keys import fold_key, fold_object_key
from delta_sync.tensor_delta import TensorDelta

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey


def attach_fold(
    store: Store,
    base: Manifest,
    target: Manifest,
    deltas: Sequence[TensorDelta],
    tensors: Mapping[str, TensorState],
    signing_key: SigningKey | None = None,
) -> FoldRecord:
    """Store ``deltas``, which turn ``base``'s bits into ``target``'s, as one object, and its record last.

    ``tensors``: the state at ``target`` of every tensor they touch. An earlier fold of the same versions gives way.
    ChainError if ``base`` is not before ``target`` in one run; FormatError for malformed deltas.
    """
    if base.run != target.run or base.version >= target.version:
        expected, got = f"a base before version {target.version} of run {target.run}", f"{base.version} of {base.run}"
        raise ChainError("fold", expected=expected, got=got)
    refs: tuple[ObjectRef, ...] = ()
    if deltas:
        data = encode_delta(DeltaHeader(target.run, target.version, base.version, DEFAULT_CODEC), deltas)
        sha256 = hashlib.sha256(data).hexdigest()
        refs = (ObjectRef(fold_object_key(target.version, target.epoch, base.version, sha256), len(data), sha256),)
        store.put(refs[0].key, data)
    bare = FoldRecord(
        run=target.run,
        version=target.version,
        epoch=target.epoch,
        manifest=target.sha256,
        base_version=base.version,
        base_manifest=base.sha256,
        state_digest=target.state_digest,
        objects=refs,
        tensors=dict(tensors),
        codec=DEFAULT_CODEC,
        created_at=time.time(),
    )
    record = sign(bare, signing_key)
    store.put(fold_key(target.version, target.epoch, base.version), record.to_bytes())
    return record
