"""The digest of live regions: compiled on CPU, Triton on a GPU (else chunked torch), the same sums on all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch

from delta_sync.digest import digest_region
from delta_sync.digest import tensor_key as core_tensor_key
from vllm_delta_plugin.live_storage import HAS_TRITON, LiveStorage
from vllm_delta_plugin.regions import Region, split

if TYPE_CHECKING:
    from vllm_delta_plugin.gpu_digest import DigestGroup

_MASK = 2**64 - 1
_CHUNK = 1 << 22  # elements a torch pass handles at once: about 32 MiB for each int64 temporary
_LAUNCH = 1 << 25  # elements a Triton launch handles: 0.05 ms (H200, an older kernel); decoding steps get between


@cache
def tensor_key(name: str) -> int:
    """The digest key of a tensor, remembered."""
    return core_tensor_key(name)


class Digests:
    """The digests of many live regions. Iterate over it to have them made, then take the ``result``.

    On a GPU nothing waits before that, and many regions share a launch. Each pass yields whether it was a launch.
    """

    def __init__(self, storages: Sequence[LiveStorage], regions: Sequence[Region]) -> None:
        self._storages, self._regions = storages, regions
        self._known: dict[int, int] = {}  # a region's number -> its digest
        self._groups: list[DigestGroup] = []

    def __iter__(self) -> Iterator[bool]:
        groups: dict[tuple[int, int], DigestGroup] = {}
        for number, region in enumerate(self._regions):
            storage = self._storages[region.storage]
            if not _kernel_takes(storage, region):
                self._known[number] = region_digest(storage, region)
            elif region.numel:
                from vllm_delta_plugin.gpu_digest import DigestGroup

                kind = (max(1, len(region.shape)), storage.dtype.itemsize)
                if kind not in groups:
                    groups[kind] = DigestGroup(kind[0], storage.bits)
                groups[kind].add(number, region, storage)
            yield False
        self._groups = list(groups.values())
        for group in self._groups:
            for _ in group.launch(_LAUNCH):
                yield True

    @property
    def result(self) -> list[int]:
        """Of each region; waits for the GPU."""
        found = dict(self._known)
        for group in self._groups:
            found |= group.result
        return [found.get(number, 0) & _MASK for number in range(len(self._regions))]


def _kernel_takes(storage: LiveStorage, region: Region) -> bool:
    if storage.on_cpu or not HAS_TRITON:
        return False
    from vllm_delta_plugin.gpu_kernels import MAX_DIMS

    return len(region.shape) <= MAX_DIMS


def region_digest(storage: LiveStorage, region: Region) -> int:
    """The region's part of its tensor's digest, without the kernel: sum of r(position) * bits modulo 2**64."""
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
    return torch_digest(storage.bits, region, key, storage.dtype.itemsize)


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
