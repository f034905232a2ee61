"""Buckets of tiles through the GPU: one is compared while the one before leaves and the one after comes in.

The kernels run on the current stream, so what frees or rewrites parameters later is ordered after them. Snapshot bits
that are in host memory come in on a stream beside it, changes go out on another. At most ``BUCKETS`` are on the device.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.dtypes import DType
from delta_sync.tensor_delta import TensorDelta
from trl_callback.extract import SIGNED, TORCH_DTYPES, Deltas, Pair
from trl_callback.extract_kernels import (
    BLOCK,
    F32_TO_BF16,
    F32_TO_F16,
    ROOM,
    SAME16,
    SAME32,
    TILE,
    WARPS,
    compare,
    gather,
)  # fmt: skip
from trl_callback.lanes import Lane, Mark
from trl_callback.pinned import Arena

BUCKETS = 3  # on the device at once: one compared, one on its way in, one on its way out
_FIRST_ROOM = 1 << 20  # changes that the first capture has pinned memory for at once
_SPARE = 1 << 22  # bytes for rows about pieces, and what the allocator rounds up: 1 MiB a large tensor
_A_TILE = 16  # bytes for its piece, its count and where its changes end
_CASTS = {("BF16", torch.float32): F32_TO_BF16, ("F16", torch.float32): F32_TO_F16}


@dataclass(frozen=True)
class Kind:
    """What the tensors of a bucket have in common: cast, whether PyTorch casts first, width, where the snapshot is."""

    cast: int
    converted: bool
    dtype: str
    width: int  # bytes of an element served
    streamed: bool

    @classmethod
    def of(cls, pair: Pair) -> Kind:
        """A pair's kind."""
        same, served = pair.live.dtype == TORCH_DTYPES[pair.dtype.name], (pair.dtype.name, pair.live.dtype)
        cast = _CASTS.get(served, SAME16 if pair.dtype.itemsize == 2 else SAME32)
        converted = not same and served not in _CASTS
        return cls(cast, converted, pair.dtype.name, pair.dtype.itemsize, pair.held.device != pair.live.device)

    def tiles(self, room: int) -> int:
        """How many tiles a bucket of ``room`` bytes on the device has, at least one."""
        found, out = TILE // 8, ROOM * (8 + self.width)
        whole = TILE * self.width * (self.streamed + self.converted)
        return max(1, (room - min(room // 8, _SPARE)) // (found + out + whole + _A_TILE))


@dataclass
class Bucket:
    """Consecutive pieces of one kind's tensors, and where their changes are on the device."""

    kind: Kind
    pairs: list[Pair] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)  # of each pair: elements from, to
    live: list[torch.Tensor] = field(default_factory=list)
    first_tiles: list[int] = field(default_factory=list)
    tiles: int = 0

    def add(self, pair: Pair, begin: int, most: int) -> int:
        """Take what fits of a pair from ``begin`` on, ``most`` tiles in all; returns where the rest begins."""
        end = min(pair.live.numel(), begin + (most - self.tiles) * TILE)
        live = pair.live[begin:end]
        self.live.append(live.to(TORCH_DTYPES[pair.dtype.name]) if self.kind.converted else live)
        self.pairs.append(pair)
        self.spans.append((begin, end))
        self.first_tiles.append(self.tiles)
        self.tiles += -(-(end - begin) // TILE)
        return end

    def release(self) -> None:
        """Let go of the weights: adapters merged, or converted ones, are copies of this capture's own."""
        self.pairs.clear()
        self.live.clear()

    @cached_property
    def held(self) -> list[torch.Tensor]:
        """The pieces of the snapshot."""
        return [pair.held[begin:end] for pair, (begin, end) in zip(self.pairs, self.spans, strict=True)]

    def table(self, held: list[int]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32], bool]:
        """The kernels' rows, each tile's row, and whether all addresses allow wide loads."""
        rows = [
            (live.data_ptr(), at, end - begin, tile, begin)
            for live, at, (begin, end), tile in zip(self.live, held, self.spans, self.first_tiles, strict=True)
        ]
        table = np.array(rows, np.int64)
        tiles = np.diff(np.array([*self.first_tiles, self.tiles]))
        return table, np.repeat(np.arange(len(rows), dtype=np.int32), tiles), not (table[:, :2] % 16).any()


@dataclass
class Tensor:
    """What is known of a tensor once it is compared, its weights no more: where its changes are in the arena."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: Kind
    begin: int = 0
    end: int = 0


@dataclass
class Launched:
    """A bucket whose kernels are on their way, with all memory they use."""

    bucket: Bucket
    tables: tuple[torch.Tensor, torch.Tensor]
    differing: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor
    out: tuple[torch.Tensor, torch.Tensor]
    host_counts: torch.Tensor
    streamed: torch.Tensor | None  # the buffer that its snapshot came into: read again where changes are dense
    done: Mark
    copied: Mark | None = None


class Pipeline:
    """Finds the changes of pairs on one device, with at most about ``bucket_bytes`` of its memory; not thread-safe."""

    def __init__(self, device: torch.device, bucket_bytes: int) -> None:
        self._device, self._room = device, bucket_bytes // BUCKETS
        self._rooms: dict[Kind, int] = {}  # changes that the last capture had
        self._nan: dict[str, int] = {}

    def __call__(self, pairs: Iterable[Pair]) -> Deltas:
        """See ``extract.extractor``."""
        with torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext():
            return _Capture(self._device, self._room, self._rooms, self._nan).run(pairs)


class _Capture:
    def __init__(self, device: torch.device, room: int, rooms: dict[Kind, int], nan: dict[str, int]) -> None:
        self._device, self._room, self._rooms, self._nan = device, room, rooms, nan
        self._main, self._in, self._out = Lane(device), Lane(device, beside=True), Lane(device, beside=True)
        self._began = self._main.mark()
        self._streamed: list[torch.Tensor] = []
        self._arenas: dict[Kind, Arena] = {}
        self._found: dict[Hashable, Tensor] = {}

    def run(self, pairs: Iterable[Pair]) -> Deltas:
        """One bucket ahead: launch the next before the last one's counts are waited for."""
        there: deque[Launched] = deque()
        for number, bucket in enumerate(self._buckets(pairs)):
            if len(there) == BUCKETS:
                self._leave(there.popleft())
            there.append(self._launch(bucket, number))
            if len(there) > 1:
                self._collect(there[-2])
        if there:
            self._collect(there[-1])
        self._out.mark().wait()
        self._rooms.update({kind: arena.used for kind, arena in self._arenas.items()})
        return self._deltas()

    def _leave(self, launched: Launched) -> None:
        """Wait until a bucket's changes are on the host: its memory is free again."""
        assert launched.copied is not None  # collected when the next was launched
        launched.copied.wait()

    def _buckets(self, pairs: Iterable[Pair]) -> Iterator[Bucket]:
        filling: dict[Kind, Bucket] = {}
        for pair in pairs:
            kind, begin = Kind.of(pair), 0
            most = kind.tiles(self._room)
            self._found[pair.key] = Tensor(pair.name, pair.dtype, pair.shape, kind)
            while begin < pair.live.numel():
                bucket = filling.setdefault(kind, Bucket(kind))
                begin = bucket.add(pair, begin, most)
                if bucket.tiles == most:
                    yield filling.pop(kind)
        yield from filling.values()

    def _launch(self, bucket: Bucket, number: int) -> Launched:
        kind, signed = bucket.kind, SIGNED[bucket.kind.width]
        streamed = self._buffer(bucket, number) if kind.streamed else None
        held = bucket.held if streamed is None else self._bring(bucket, streamed)
        table, piece_of, aligned = bucket.table([piece.data_ptr() for piece in held])
        room = bucket.tiles * ROOM
        launched = Launched(
            bucket, (self._upload(table.reshape(-1)), self._upload(piece_of)),
            self._empty(bucket.tiles * TILE // 8, torch.int8),
            self._empty(bucket.tiles, torch.int32), self._empty(bucket.tiles, torch.int64),
            (self._empty(room, torch.int64), self._empty(room, signed)),
            torch.empty(bucket.tiles, dtype=torch.int32, pin_memory=self._device.type != "cpu"),
            streamed, self._began,
        )  # fmt: skip
        compare[(bucket.tiles,)](
            *launched.tables, launched.differing, launched.counts, ALIGNED=aligned, BLOCK=BLOCK, **self._how(kind)
        )
        torch.cumsum(launched.counts, 0, dtype=torch.int64, out=launched.ends)
        self._gather(launched, 0)
        launched.host_counts.copy_(launched.counts, non_blocking=True)
        launched.done = self._main.mark()
        return launched

    def _how(self, kind: Kind) -> dict[str, int]:
        nan = self._nan_bits(kind)
        return {"CAST": kind.cast, "NAN": nan, "WIDTH": 8 * kind.width, "TILE": TILE, "num_warps": WARPS}

    def _nan_bits(self, kind: Kind) -> int:
        """The bits that PyTorch makes of a float32 NaN on this device."""
        if kind.dtype not in self._nan:
            nan = torch.full((1,), torch.nan, device=self._device).to(TORCH_DTYPES[kind.dtype])
            self._nan[kind.dtype] = int(nan.view(SIGNED[kind.width]).item())
        return self._nan[kind.dtype]

    def _gather(self, launched: Launched, first: int) -> None:
        room = launched.out[0].numel()
        gather[(launched.bucket.tiles,)](
            *launched.tables, launched.differing, launched.counts, launched.ends, first, room, *launched.out,
            **self._how(launched.bucket.kind),
        )  # fmt: skip

    def _buffer(self, bucket: Bucket, number: int) -> torch.Tensor:
        """Where on the device a bucket's snapshot comes in."""
        width = bucket.kind.width
        if not self._streamed or self._streamed[0].numel() < bucket.tiles * TILE * width:
            self._main.mark().wait()  # nothing reads the smaller buffers any more, but one that is not collected yet
            most = bucket.kind.tiles(self._room) * TILE * width
            self._streamed = [self._empty(most, torch.int8) for _ in range(BUCKETS)]
            self._in.after(self._main.mark())
        return self._streamed[number % BUCKETS]

    def _bring(self, bucket: Bucket, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Start the copy of a bucket's snapshot to the device, and have the kernels wait for it; its pieces there."""
        target = buffer.view(SIGNED[bucket.kind.width])
        places = [target[tile * TILE :][: piece.numel()] for tile, piece in
                  zip(bucket.first_tiles, bucket.held, strict=True)]  # fmt: skip
        with self._in.work():
            for place, piece in zip(places, bucket.held, strict=True):
                place.copy_(piece, non_blocking=True)
        self._main.after(self._in.mark())
        return places

    def _collect(self, launched: Launched) -> None:
        """Once a bucket is compared: start the copy of its changes to the host, and note which tensor's they are."""
        launched.done.wait()
        counts = np.add.reduceat(launched.host_counts.numpy(), launched.bucket.first_tiles, dtype=np.int64)
        arena = self._room_for(launched.bucket.kind, int(counts.sum()))
        end = arena.used
        for pair, count in zip(launched.bucket.pairs, counts.tolist(), strict=True):
            tensor = self._found[pair.key]
            tensor.begin, tensor.end = end if tensor.begin == tensor.end else tensor.begin, end + count
            end += count
        room, mark = launched.out[0].numel(), launched.done
        for first in range(0, end - arena.used, room):
            if first:  # denser than the buffer: what is left, in turns
                self._main.after(self._out.mark())
                self._gather(launched, first)
                mark = self._main.mark()
            self._out.after(mark)
            size = min(room, end - arena.used)
            place = arena.take(size)
            with self._out.work():
                arena.positions[place].copy_(launched.out[0][:size], non_blocking=True)
                arena.steps[place].copy_(launched.out[1][:size], non_blocking=True)
        launched.copied = self._out.mark()
        launched.streamed = None
        launched.bucket.release()

    def _room_for(self, kind: Kind, count: int) -> Arena:
        if kind not in self._arenas:
            room = max(count, _FIRST_ROOM, self._rooms.get(kind, 0) * 5 // 4)
            self._arenas[kind] = Arena(room, SIGNED[kind.width], self._device)
        arena = self._arenas[kind]
        if not arena.fits(count):
            self._out.mark().wait()
            arena.grow(count)
        return arena

    def _deltas(self) -> Deltas:
        found: dict[Hashable, TensorDelta] = {}
        for key, tensor in self._found.items():
            if tensor.begin < tensor.end:
                arena, place = self._arenas[tensor.kind], slice(tensor.begin, tensor.end)
                positions = arena.positions[place].numpy()
                steps = arena.steps[place].numpy().view(tensor.dtype.carrier)
                found[key] = TensorDelta(tensor.name, tensor.dtype, tensor.shape, "ulp", positions, steps)
        return found

    def _empty(self, size: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=self._device)

    def _upload(self, table: npt.NDArray[np.signedinteger]) -> torch.Tensor:
        host = torch.from_numpy(table)
        return host if self._device.type == "cpu" else host.pin_memory().to(self._device, non_blocking=True)
