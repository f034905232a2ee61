"""One tiny version staged and swapped beside the model, so that nothing compiles when a real one comes.

Without it the first version made open streams wait for numba and Triton, which hold the interpreter while they work.
What transfer.py pins for uploads is pinned here too.
"""

from __future__ import annotations

import numpy as np
import torch

from delta_sync.bitmap import Bits
from delta_sync.delta import diff, fold
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, Unpacked, decode_delta, encode_delta
from delta_sync.dtypes import DType
from delta_sync.errors import IntegrityError
from vllm_delta_plugin.commit import Device
from vllm_delta_plugin.coverage import TensorInfo, WeightMap
from vllm_delta_plugin.live_storage import LiveStorage
from vllm_delta_plugin.regions import make_region

_SIZE = 256


def rehearse(like: LiveStorage, device: Device) -> None:
    """Decode, fold, map, sum up and swap, forth and back, in scratch memory like this storage's."""
    old = np.zeros(_SIZE, like.dtype.carrier)
    middle, new = old.copy(), old.copy()
    middle[::3], new[::2] = 1, 2
    steps = [_coded(like.dtype, old, middle), _coded(like.dtype, middle, new)]
    with device.reading():
        weights = _scratch(like)  # here: what reads it waits for its zeros
        folded, alone = (device.builder(weights, limit=2**20) for _ in range(2))
        folded.add_deltas({"rehearsal": fold([decode_delta(step)[1][0] for step in steps])})
        object_ = device.read(_coded(like.dtype, old, new))
        if isinstance(object_, Unpacked):
            alone.add_unpacked(object_)
        else:
            alone = folded
    swaps = [device.prepare(builder) for builder in (folded, alone)]
    for swap, expected in zip([swaps[0], swaps[0], swaps[1], swaps[1]], [new, old, new, old], strict=True):
        swap.swap(lambda: None)
        if not np.array_equal(weights.storages[0].read(np.arange(_SIZE)), expected):
            what = f"a swap of {like.dtype.name} in scratch memory on {like.bits.device}"
            raise IntegrityError(what, expected="the staged bits", got="others", remedy="report it with the GPU's name")


def _scratch(like: LiveStorage) -> WeightMap:
    storage = LiveStorage("rehearsal", like.dtype, torch.zeros(_SIZE, dtype=like.bits.dtype, device=like.bits.device))
    region = make_region("rehearsal", 0, (_SIZE,), 0, (1,), 0, (1,))
    return WeightMap([storage], {"rehearsal": TensorInfo(like.dtype, (_SIZE,))}, {"rehearsal": [region]})


def _coded(dtype: DType, old: Bits, new: Bits) -> bytes:
    delta = diff("rehearsal", dtype, (_SIZE,), old, new)
    return encode_delta(DeltaHeader("rehearsal", 2, 1, DEFAULT_CODEC, {}), [delta])
