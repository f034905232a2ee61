"""The digest of live regions: compiled on CPU, Triton on a GPU (else chunked torch), the same sums on all."""

from __future__ import annotations

from functools import cache

import torch

from delta_sync.digest import digest_region
from delta_sync.digest import tensor_key as core_tensor_key
from vllm_delta_plugin.live_storage import HAS_TRITON, LiveStorage
from vllm_delta_plugin.regions import Region, split

_MASK = 2**64 - 1
_CHUNK = 1 << 22  # elements a torch pass handles at once: about 32 MiB for each int64 temporary
_LAUNCH = 1 << 25  # elements a Triton launch handles: less than a millisecond, so that decoding steps get between


@cache
def tensor_key(name: str) -> int:
    """The digest key of a tensor, remembered."""
    return core_tensor_key(name)


def region_digest(storage: LiveStorage, region: Region) -> int:
    """The region's part of its tensor's digest: sum of r(position) * bits modulo 2**64 over live memory."""
    key = tensor_key(region.tensor)
    if storage.on_cpu:
        return digest_region(
            storage.array,
            region.dst_offset,
            region.dst_strides,
            region.src_offset,
            region.src_strides,
            region.shape,
            key,
        )
    if HAS_TRITON:
        return triton_digest(storage.bits, region, key, storage.dtype.itemsize)
    return torch_digest(storage.bits, region, key, storage.dtype.itemsize)


def triton_digest(bits: torch.Tensor, region: Region, key: int, itemsize: int) -> int:
    """``region_digest`` as a fused kernel; ``bits`` is the flat signed-integer view of the storage."""
    from vllm_delta_plugin import gpu_kernels

    if len(region.shape) > gpu_kernels.MAX_DIMS:
        return torch_digest(bits, region, key, itemsize)
    total = torch.zeros(1, dtype=torch.int64, device=bits.device)
    for piece in split(region, _LAUNCH):
        gpu_kernels.add_digest(bits, piece, as_signed(key), total, itemsize)
    return int(total.item()) & _MASK


def torch_digest(bits: torch.Tensor, region: Region, key: int, itemsize: int) -> int:
    """``region_digest`` in torch; ``bits`` is the flat signed-integer view of the storage."""
    total = torch.zeros((), dtype=torch.int64, device=bits.device)
    for piece in split(region, _CHUNK):
        live = bits.as_strided(piece.shape, piece.dst_strides, piece.dst_offset)
        unsigned = live.to(torch.int64) & ((1 << 8 * itemsize) - 1)
        total += (_factors(piece, key, bits.device) * unsigned).sum()
    return int(total.item()) & _MASK


def _factors(region: Region, key: int, device: torch.device) -> torch.Tensor:
    """r(position) for every element of the region, int64 of the region's shape (two's complement of the uint64)."""
    positions = torch.full((1,) * len(region.shape), region.src_offset + 1, dtype=torch.int64, device=device)
    for dim, (n, stride) in enumerate(zip(region.shape, region.src_strides, strict=True)):
        steps = torch.arange(n, dtype=torch.int64, device=device) * stride
        positions = positions + steps.reshape([-1 if d == dim else 1 for d in range(len(region.shape))])
    z = positions * as_signed(0x9E3779B97F4A7C15) + as_signed(key)
    z = (z ^ _shift(z, 30)) * as_signed(0xBF58476D1CE4E5B9)
    z = (z ^ _shift(z, 27)) * as_signed(0x94D049BB133111EB)
    return (z ^ _shift(z, 31)) | 1


def _shift(value: torch.Tensor, by: int) -> torch.Tensor:
    """Logical right shift of an int64 tensor."""
    return (value >> by) & ((1 << (64 - by)) - 1)


def as_signed(value: int) -> int:
    """A 64-bit pattern as the int64 that has it."""
    return value - 2**64 if value >= 2**63 else value
