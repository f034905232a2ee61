"""What changed on a device since the snapshot, without the model ever leaving it: only positions and steps do."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch

from delta_sync.dtypes import DType
from delta_sync.tensor_delta import TensorDelta

BUCKET_BYTES = 512 * 1024**2  # device memory that one extraction uses beside the model
TORCH_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
SIGNED = {2: torch.int16, 4: torch.int32}
_TORCH_BYTES = 40  # an element, at most, of what torch_extract holds of one bucket


@dataclass(frozen=True)
class Pair:
    """One tensor now and when last published.

    live: the flat contiguous parameter, of any float type. held: the bits last published, flat, as signed integers of
    the serving type's width, on the same device or in (pinned) host memory. key: what the result is filed under.
    """

    key: Hashable
    name: str
    dtype: DType
    shape: tuple[int, ...]
    live: torch.Tensor
    held: torch.Tensor


Deltas = Mapping[Hashable, TensorDelta]
Extract = Callable[[Iterable[Pair]], Deltas]


def extractor(device: torch.device, bucket_bytes: int = BUCKET_BYTES) -> Extract:
    """What finds the changes of pairs that live on ``device``, within ``bucket_bytes`` of its memory.

    The result has the changed tensors only, in the order of the pairs, and is that of ``delta_sync.delta.diff``.
    """
    if device.type == "cuda" and find_spec("triton") is not None:
        from trl_callback.extract_pipeline import Pipeline

        return Pipeline(device, bucket_bytes)
    return lambda pairs: torch_extract(pairs, bucket_bytes)


def torch_extract(pairs: Iterable[Pair], bucket_bytes: int = BUCKET_BYTES) -> Deltas:
    """The same with PyTorch's own operations: the fallback, and what the kernels are checked against."""
    length = max(1, bucket_bytes // _TORCH_BYTES)
    found: dict[Hashable, TensorDelta] = {}
    for pair in pairs:
        size = pair.live.numel()
        parts = [_changes(pair, begin, min(size, begin + length)) for begin in range(0, size, length)]
        if any(positions.numel() for positions, _ in parts):
            positions = np.concatenate([part.cpu().numpy() for part, _ in parts])
            steps = np.concatenate([part.cpu().numpy() for _, part in parts]).view(pair.dtype.carrier)
            found[pair.key] = TensorDelta(pair.name, pair.dtype, pair.shape, "ulp", positions, steps)
    return found


def _changes(pair: Pair, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Positions (int64) and ULP steps (signed) of the elements ``[begin, end)`` that changed."""
    signed = SIGNED[pair.dtype.itemsize]
    new = pair.live[begin:end].to(TORCH_DTYPES[pair.dtype.name]).view(signed)
    old = pair.held[begin:end].to(new.device, non_blocking=True)
    at = torch.nonzero(new != old)[:, 0]
    return at + begin, (_ordinal(new[at]) - _ordinal(old[at])).to(signed)


def _ordinal(bits: torch.Tensor) -> torch.Tensor:
    """delta_sync/bitmap.py's map for floats, as int64 of which the low bits count; ``bits`` are signed integers."""
    sign = torch.iinfo(bits.dtype).min
    wide = bits.to(torch.int64)
    return torch.where(wide < 0, ~wide, wide ^ sign)
