"""Deltas made ready on the GPU itself: live bits are read, stepped and summed up where they are.

Only places, positions and steps cross the bus, and only the sums come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_plugin.gpu_kernels import BLOCK, stage
from vllm_delta_plugin.live_digest import as_signed, tensor_key
from vllm_delta_plugin.live_storage import SIGNED, LiveStorage
from vllm_delta_plugin.staged import Pending, StageBuilder
from vllm_delta_plugin.transfer import to_device, to_host, upload

_BATCH = 1 << 20  # changes gathered on the host before they are uploaded: a bound on host memory


@dataclass(frozen=True)
class OnDevice:
    """Staged bits (signed ``[n]``) and the absolute addresses (int64 ``[n]``) they belong to, of one element width."""

    addresses: torch.Tensor
    staged: torch.Tensor


@dataclass
class GpuStageBuilder(StageBuilder):
    """A StageBuilder whose deltas never meet the host's copy of old bits, because there is none."""

    on_device: list[OnDevice] = field(default_factory=list)

    def _add(self, pending: Sequence[Pending]) -> None:
        def width(item: Pending) -> int:
            return self.weights.storages[item.region.storage].dtype.itemsize

        for size, same in groupby(sorted(pending, key=width), key=width):
            items = list(same)
            self._grow(sum(item.dst.size for item in items) * (8 + size))
            ready, sums, counts = stage_on_device(items, self.weights.storages)
            self.on_device.append(ready)
            for item, change, count in zip(items, sums, counts, strict=True):
                self._note(item.region, change, count)


def stage_on_device(
    pending: Sequence[Pending], storages: Sequence[LiveStorage]
) -> tuple[OnDevice, list[int], list[int]]:
    """Stage changes of one element width; also each one's digest change (modulo 2**64) and how many elements differ.

    Runs on the current stream, and returns when the GPU is done.
    """
    first = storages[pending[0].region.storage]
    device, signed = first.bits.device, SIGNED[first.dtype.itemsize]
    size = sum(item.dst.size for item in pending)
    ready = OnDevice(
        torch.empty(size, dtype=torch.int64, device=device), torch.empty(size, dtype=signed, device=device)
    )
    sums = torch.zeros(len(pending), dtype=torch.int64, device=device)
    counts = torch.zeros(len(pending), dtype=torch.int32, device=device)
    pieces = to_device(np.array([_piece(item, storages) for item in pending], np.int64).reshape(-1), device)
    at = 0
    for numbers in _batches(pending):
        items = [pending[number] for number in numbers]
        lengths = [item.dst.size for item in items]
        part = slice(at, at + sum(lengths))
        at = part.stop
        elements, staged = ready.addresses[part], ready.staged[part]
        upload(np.concatenate([item.dst for item in items]), elements)
        upload(np.concatenate([item.values for item in items]).view(f"<i{first.dtype.itemsize}"), staged)
        positions = to_device(np.concatenate([item.positions for item in items]), device)
        programs = _programs(lengths, numbers)
        stage[(len(programs),)](
            elements, positions, staged, to_device(programs.reshape(-1), device), pieces, sums, counts,
            WIDTH=8 * first.dtype.itemsize, BLOCK=BLOCK,
        )  # fmt: skip
    changes = [int(value) % 2**64 for value in to_host(sums)]
    return ready, changes, [int(count) for count in to_host(counts)]


def _piece(item: Pending, storages: Sequence[LiveStorage]) -> tuple[int, int, int]:
    """The kernel's row: the storage's address, the tensor's digest key, whether the values are bits."""
    storage = storages[item.region.storage]
    return storage.bits.data_ptr(), as_signed(tensor_key(item.region.tensor)), int(item.delta.encoding == "raw")


def _batches(pending: Sequence[Pending]) -> Iterator[range]:
    """Runs of items of about _BATCH changes; an item is never cut."""
    begin = size = 0
    for number, item in enumerate(pending):
        size += item.dst.size
        if size >= _BATCH or number == len(pending) - 1:
            yield range(begin, number + 1)
            begin, size = number + 1, 0


def _programs(lengths: Sequence[int], numbers: Sequence[int]) -> npt.NDArray[np.int64]:
    """Rows of (first change, end, piece) so that no program crosses from one piece into the next."""
    rows: list[npt.NDArray[Any]] = []
    begin = 0
    for length, number in zip(lengths, numbers, strict=True):
        first = np.arange(begin, begin + length, BLOCK, dtype=np.int64)
        begin += length
        rows.append(np.stack([first, np.minimum(first + BLOCK, begin), np.full_like(first, number)], axis=1))
    return np.concatenate(rows)
