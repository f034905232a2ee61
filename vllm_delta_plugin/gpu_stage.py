"""Deltas made ready on the GPU itself: live bits are found, read, stepped and summed up where they are.

What crosses the bus is an object's unpacked streams, about 2.2 bytes a bfloat16 change (gpu_decode.py), or of deltas
that had to be decoded or folded on the host positions and steps, 6 bytes; what comes back are the sums.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.delta_file import Unpacked, UnpackedGroup
from delta_sync.gaps import slices
from delta_sync.jit import compiled
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.background import Pace
from vllm_delta_plugin.gpu_coded import CodedPiece, Pending, stage_coded_on_device
from vllm_delta_plugin.gpu_decode import DECODING, can_decode
from vllm_delta_plugin.gpu_kernels import BLOCK, MAX_DIMS, stage
from vllm_delta_plugin.gpu_pieces import OnDevice, joined, row
from vllm_delta_plugin.live_storage import SIGNED, LiveStorage
from vllm_delta_plugin.regions import Region, map_positions
from vllm_delta_plugin.staged import StageBuilder
from vllm_delta_plugin.transfer import send, to_device, to_host

_BATCH = 1 << 20  # changes that go to the device together
_REACH = 2**32  # positions that a region may span, as they are sent in 32 bits


@dataclass(frozen=True)
class Piece:
    """The changes of one delta that lie in one region: positions (int64 ``[n]``) and steps or bits (``[n]``)."""

    region: Region
    encoding: str
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[Any]


@dataclass
class GpuStageBuilder(StageBuilder):
    """A StageBuilder whose deltas meet the bits they change on the GPU only."""

    on_device: list[OnDevice] = field(default_factory=list)
    _pending: list[Pending] = field(default_factory=list)
    _made: list[OnDevice] = field(default_factory=list)

    def add_unpacked(self, object_: Unpacked) -> bool:
        """See StageBuilder."""
        names = [entry.name for group in object_.groups for entry in group.entries]
        regions = [region for name in names for region in self.weights.regions.get(name, ())]
        if not can_decode(object_) or any(len(region.shape) > MAX_DIMS for region in regions):
            return False
        if any(self.weights.staged_on_host(region) for region in regions):
            return False
        if DECODING * max((group.coded.changed for group in object_.groups), default=0) > self.limit - self._bytes:
            return False
        for group in object_.groups:
            if group.coded.changed:
                self._add_group(group)
        return True

    def _add_group(self, group: UnpackedGroup) -> None:
        coded, parts, pace = group.coded, [], Pace()
        for entry, size, changes in zip(group.entries, coded.sizes, slices(coded.counts), strict=True):
            for region in self.weights.regions.get(entry.name, ()) if entry.count else ():
                parts.append(CodedPiece(region, changes, size))
                # A part of a tensor is taken to have its share of the changes: how many it has turns out on the GPU.
                self._grow(entry.count * region.numel // size * (8 + coded.dtype.itemsize))
            pace()
        ready, pending = stage_coded_on_device(group, parts, self.weights.storages)
        self.on_device.append(ready)
        self._pending.append(pending)

    def finish(self) -> None:
        """See StageBuilder; waits for the GPU."""
        self.on_device += joined(self._made)
        self._made.clear()
        pending, self._pending = self._pending, []
        if not pending:
            return
        found = to_host(torch.cat([one.report for one in pending]))
        pace = Pace()
        for one, part in zip(pending, slices([one.report.numel() for one in pending]), strict=True):
            for region, change, count in one.results(found[part]):
                self._note(region, change, count)
                pace()

    def add_deltas(self, deltas: Mapping[str, Sequence[TensorDelta]]) -> None:
        """See StageBuilder."""
        pieces: dict[int, list[Piece]] = {}
        others: dict[str, Sequence[TensorDelta]] = {}
        pace = Pace()
        for name, folded in deltas.items():
            regions = self.weights.regions.get(name, ())
            far = any(len(r.shape) > MAX_DIMS or r.src_last - r.src_offset >= _REACH for r in regions)
            if far or any(self.weights.staged_on_host(region) for region in regions):
                others[name] = folded
                continue
            for region in regions:
                width = self.weights.storages[region.storage].dtype.itemsize
                pieces.setdefault(width, []).extend(_inside(region, delta) for delta in folded)
                pace()
        super().add_deltas(others)
        for width, found in pieces.items():
            self._add_pieces(width, [piece for piece in found if piece.positions.size])

    def add_made(self, storage: int, index: torch.Tensor, bits: torch.Tensor) -> None:
        """See StageBuilder; nothing leaves the GPU."""
        self._grow(index.nbytes + bits.nbytes)
        live = self.weights.storages[storage].bits
        address = live.data_ptr() + index * live.element_size()
        self._made.append(OnDevice(address, bits ^ live[index]))

    def _add_pieces(self, width: int, pieces: Sequence[Piece]) -> None:
        if not pieces:
            return
        self._grow(sum(piece.positions.size for piece in pieces) * (8 + width))
        ready, sums, counts = stage_on_device(pieces, self.weights.storages)
        self.on_device.append(ready)
        for piece, change, count in zip(pieces, sums, counts, strict=True):
            self._note(piece.region, change, count)


def stage_on_device(pieces: Sequence[Piece], storages: Sequence[LiveStorage]) -> tuple[OnDevice, list[int], list[int]]:
    """Stage changes of one element width; also each piece's digest change (modulo 2**64) and how many elements differ.

    Runs on the current stream, and returns when the GPU is done.
    """
    first = storages[pieces[0].region.storage]
    device, width = first.bits.device, first.dtype.itemsize
    total = sum(piece.positions.size for piece in pieces)
    ready = OnDevice(
        torch.empty(total, dtype=torch.int64, device=device), torch.empty(total, dtype=SIGNED[width], device=device)
    )
    relative = torch.empty(min(total, _BATCH), dtype=torch.int32, device=device)
    pace, rows = Pace(), []
    for piece in pieces:
        rows.append(row(piece.region, storages, raw=piece.encoding == "raw"))
        pace()
    table = to_device(np.array(rows, np.int64).reshape(-1), device)
    sums = torch.zeros(len(pieces), dtype=torch.int64, device=device)
    counts = torch.zeros(len(pieces), dtype=torch.int32, device=device)
    buffer = _Buffer(relative.numel(), SIGNED[width])
    at = 0
    for runs in _batches(pieces):
        programs = buffer.fill(pieces, runs)
        size = sum(stop - start for _, start, stop in runs)
        staged = ready.staged[at : at + size]
        buffer.upload(relative[:size], staged)
        stage[(len(programs),)](
            relative, ready.addresses[at : at + size], staged, to_device(programs.reshape(-1), device), table, sums,
            counts, WIDTH=8 * width, BLOCK=BLOCK,
        )  # fmt: skip
        at += size
    changes = [int(value) % 2**64 for value in to_host(sums)]
    return ready, changes, [int(count) for count in to_host(counts)]


Run = tuple[int, int, int]  # a piece's number, and which of its changes: from, to


class _Buffer:
    """Room for one batch on the host."""

    def __init__(self, size: int, dtype: torch.dtype) -> None:
        self._pace = Pace()
        self._relative = torch.empty(size, dtype=torch.int32).numpy()
        self._values = torch.empty(size, dtype=dtype).numpy()

    def fill(self, pieces: Sequence[Piece], runs: Sequence[Run]) -> npt.NDArray[np.int64]:
        """Bring the runs together; returns (first change, end, piece) for programs that never cross into another."""
        relative, values = self._relative.view(np.uint32), self._values
        rows: list[npt.NDArray[np.int64]] = []
        at = 0
        for number, start, stop in runs:
            piece, end = pieces[number], at + stop - start
            self._pace()
            _subtract(piece.positions[start:stop], piece.region.src_offset, relative[at:end])
            values[at:end] = piece.values[start:stop].view(values.dtype)
            begins = np.arange(at, end, BLOCK, dtype=np.int64)
            rows.append(np.stack([begins, np.minimum(begins + BLOCK, end), np.full_like(begins, number)], axis=1))
            at = end
        return np.concatenate(rows)

    def upload(self, relative: torch.Tensor, values: torch.Tensor) -> None:
        """Copy what was filled in."""
        send(self._relative[: relative.numel()], relative)
        send(self._values[: values.numel()], values)


@compiled
def _subtract(positions: Any, first: Any, out: Any) -> None:
    for i in range(positions.size):
        out[i] = positions[i] - first


def _inside(region: Region, delta: TensorDelta) -> Piece:
    """The part of a delta that lies in the region; without a copy where the region is one run of the tensor."""
    if len(region.shape) == 0 or (len(region.shape) == 1 and region.src_strides == (1,)):
        low, high = np.searchsorted(delta.positions, (region.src_offset, region.src_last + 1))
        return Piece(region, delta.encoding, delta.positions[low:high], delta.values[low:high])
    which, _ = map_positions(region, delta.positions)
    if which.size == delta.changed:
        return Piece(region, delta.encoding, delta.positions, delta.values)
    return Piece(region, delta.encoding, delta.positions[which], delta.values[which])


def _batches(pieces: Sequence[Piece]) -> Iterator[list[Run]]:
    """All changes, in order, in lists of _BATCH."""
    runs: list[Run] = []
    room = _BATCH
    for number, piece in enumerate(pieces):
        start, size = 0, piece.positions.size
        while start < size:
            stop = min(size, start + room)
            runs.append((number, start, stop))
            room -= stop - start
            start = stop
            if not room:
                yield runs
                runs, room = [], _BATCH
    if runs:
        yield runs
