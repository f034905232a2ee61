"""Coding a group of tensors by the contexts of their old bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits, masks
from delta_sync.context_codec import STREAMS, Layer, context_field, place
from delta_sync.context_model import CONTEXTS, Tile, choose_classes, class_table
from delta_sync.context_scan import rank, scan, tell
from delta_sync.context_streams import Bytes, Words, spread, spread_gaps, tally
from delta_sync.context_table import UNARY, Table
from delta_sync.dtypes import DType
from delta_sync.frames import compress, compress_symbols
from delta_sync.gaps import MORE, slices
from delta_sync.lanes import LANES
from delta_sync.steps import split_steps
from delta_sync.threads import on_threads, shares

_POSITION_CLASSES, _STEP_CLASSES = 7, 16  # more would cost time at each element, and gain below 1 %
_UNARY_BELOW = 3  # mean gap below which a bit an element is the better code
_CLASS_BITS = 8 * 60  # what a class takes: entropy tables, frame headers, counts
_SPARE, _LEAST = 1.125, 2**-8  # room for changes, by their share in the sample
_SAMPLE, _PIECE = 2**20, 4096  # classes are chosen from about so many elements, in pieces of so many


@dataclass(frozen=True)
class Source:
    """One tensor to code: old bits in tiles, and flat new bits, or where it changes, in order, and by which steps."""

    layer: Layer
    new: Bits | None = None
    known: tuple[npt.NDArray[np.int64], Bits] | None = None


@dataclass
class Found:
    """What changed, tile by tile: positions, ULP steps, gaps within the classes, contexts, all ``[n]``."""

    positions: npt.NDArray[np.int64]
    steps: Bits
    gaps: Words
    contexts: Bytes

    @classmethod
    def room(cls, dtype: DType, size: int) -> Found:
        """Space for so many."""
        return cls(*(np.empty(size, kind) for kind in (np.int64, dtype.carrier, np.uint64, np.uint8)))

    @property
    def arrays(self) -> tuple[Any, ...]:
        """As the compiled passes take them."""
        return self.positions, self.steps, self.gaps, self.contexts


@dataclass(frozen=True)
class Coded:
    """A coded group: its streams; all positions and size bytes; each tensor's positions and steps, in tile order."""

    streams: dict[str, bytes]
    positions: npt.NDArray[np.int64]
    sizes: Bytes
    changes: list[tuple[npt.NDArray[np.int64], Bits]]


def encode_group(dtype: DType, sources: Sequence[Source], grid: tuple[int, int], threads: int) -> Coded:
    """Code tensors of one dtype, cut by ``grid``."""
    firsts, share = _position_classes(dtype, sources)
    counts, found = _find(dtype, sources, firsts, share, threads)
    sizes, extension, signs = split_steps(found.steps, dtype)
    streams = _streams(found, sizes, firsts, counts, grid, threads)
    streams |= {"step_ext": compress(extension.tobytes()), "sign": compress(signs.tobytes())}
    rows = slices([len(source.layer.tiles) for source in sources])
    per_tensor = slices([int(counts[part].sum()) for part in rows])
    changes = [(found.positions[part], found.steps[part]) for part in per_tensor]
    return Coded(streams, found.positions, sizes, changes)


def _streams(
    found: Found, sizes: Bytes, firsts: Sequence[int], counts: Words, grid: tuple[int, int], threads: int
) -> dict[str, bytes]:
    """The streams but for those of extensions and signs."""
    contexts, totals = found.contexts, counts.sum(axis=0)
    sums, pairs = tally(contexts, found.gaps, sizes, firsts)
    splits = [_split_of(int(total), int(n)) for total, n in zip(sums, totals, strict=True)]
    gaps, planes = spread_gaps(contexts, found.gaps, firsts, splits, totals, sums)
    if grid != (1, 1):  # classes made of those of positions: so ``count`` tells a reader of some tiles where steps are
        pairs = _by_class(pairs, firsts)
    step_firsts = choose_classes(pairs, _STEP_CLASSES, _CLASS_BITS)
    held = np.bincount(class_table(step_firsts), pairs.sum(axis=1), len(step_firsts)).astype(int).tolist()
    step = spread(contexts, sizes, step_firsts, held)
    frames = on_threads(compress_symbols, [*gaps, *planes, *step], threads)
    gap, low, coded = (frames[part] for part in slices([len(gaps), len(planes), len(step)]))
    head = Table(
        grid, tuple(firsts), tuple(splits), tuple(step_firsts), *(tuple(map(len, f)) for f in (gap, low, coded))
    )
    count = np.ascontiguousarray(counts.T).reshape(-1, 1).view(np.uint8).T.tobytes()  # as byte planes
    contents = (compress(head.to_bytes()), compress(count), *map(b"".join, (gap, low, coded)))
    return dict(zip(STREAMS, contents, strict=False))


def _find(
    dtype: DType, sources: Sequence[Source], firsts: Sequence[int], share: float, threads: int
) -> tuple[Words, Found]:
    """Changes of each tile and class, ``[tiles, classes]``, and all changes; about a ``share`` of elements changed."""
    jobs = [(source, tile) for source in sources for tile in source.layer.tiles]
    runs = [jobs[part] for part in shares((tile.elements for _, tile in jobs), threads)]
    done = on_threads(lambda run: _find_in(dtype, run, firsts, share), runs, threads)
    if len(done) == 1:
        return done[0]
    empty = np.empty((0, len(firsts)), np.uint64), Found.room(dtype, 0)
    counts, found = zip(empty, *done, strict=True)
    return np.concatenate(counts), Found(*map(np.concatenate, zip(*(part.arrays for part in found), strict=True)))


def _find_in(
    dtype: DType, jobs: Sequence[tuple[Source, Tile]], firsts: Sequence[int], share: float
) -> tuple[Words, Found]:
    """The same of some tiles, one after the other."""
    shift, mask = context_field(dtype)
    classes = np.asarray(firsts, np.uint8), class_table(firsts)
    n, used = len(firsts), 0
    counts = np.zeros((len(jobs), n), np.uint64)
    found = Found.room(dtype, sum(_expected(source, tile, share) for source, tile in jobs) + int(LANES))
    for (source, tile), count in zip(jobs, counts, strict=True):
        state = np.zeros(n + 1, np.uint64), np.zeros(n, np.uint64), count
        if source.known is None:
            at = np.array([0, 0, used], np.uint64)
            how = (shift, mask, *masks(dtype))
            while not scan(source.layer.old, source.new, place(tile), how, classes, (at, *state), found.arrays):
                found = Found(*(np.concatenate([a, np.empty_like(a)]) for a in found.arrays))
            used = int(at[2])
            continue
        here = _inside(source.known[0], tile)
        positions, steps = (a[here] for a in source.known)
        upto = used + positions.size
        found.positions[used:upto], found.steps[used:upto] = positions, steps
        gaps, contexts = found.gaps[used:upto], found.contexts[used:upto]
        rank(source.layer.old, positions, place(tile), (shift, mask), classes, state, gaps, contexts)
        used = upto
    return counts, Found(*(a[:used] for a in found.arrays))


def _expected(source: Source, tile: Tile, share: float) -> int:
    """Changes to have room for: all that are known, or by their share in a sample; more is made as needed."""
    if source.known is None:
        return min(tile.elements, int(tile.elements * max(share * _SPARE, _LEAST)))
    here = _inside(source.known[0], tile)
    return here.stop - here.start if isinstance(here, slice) else here.size


def _inside(positions: npt.NDArray[np.int64], tile: Tile) -> slice | npt.NDArray[np.int64]:
    """Which of a tensor's increasing positions are in a tile."""
    last = tile.start + (tile.rows - 1) * tile.stride + tile.length
    begin, end = (int(k) for k in np.searchsorted(positions, (tile.start, last)))
    if tile.rows == 1:
        return slice(begin, end)
    return begin + np.flatnonzero((positions[begin:end] - tile.start) % tile.stride < tile.length)


def _position_classes(dtype: DType, sources: Sequence[Source]) -> tuple[list[int], float]:
    """Classes chosen from a sample of all elements by how often each context changes, and how often elements do."""
    counts = np.zeros((CONTEXTS, 2), np.int64)
    elements = sum(source.layer.old.size for source in sources)
    shift, mask = context_field(dtype)
    for old, new in _sample(sources, _PIECE * max(1, elements // _SAMPLE)):
        tell(old, new, shift, mask, counts)
    sampled = int(counts.sum())
    firsts = choose_classes(counts, _POSITION_CLASSES, _CLASS_BITS * sampled // max(1, elements))
    return firsts, int(counts[:, 1].sum()) / max(1, sampled)


def _sample(sources: Sequence[Source], every: int) -> Iterator[tuple[Bits, Bits]]:
    """Pieces at equal distances in all tensors laid one after the other, before and after."""
    at = 0
    for source in sources:
        size = source.layer.old.size
        for begin in range(at, size, every):
            old = source.layer.old[begin : begin + _PIECE]
            if source.new is not None:
                yield old, source.new[begin : begin + _PIECE]
            elif source.known is not None:
                positions, new = source.known[0], old.copy()
                first, last = np.searchsorted(positions, (begin, begin + _PIECE))
                new[positions[first:last] - begin] ^= old.dtype.type(1)
                yield old, new
        at = (at - size) % every


def _by_class(pairs: npt.NDArray[np.int64], firsts: Sequence[int]) -> npt.NDArray[np.int64]:
    """The counts of each class's contexts as if all had its first."""
    summed = np.zeros_like(pairs)
    np.add.at(summed, np.asarray(firsts)[class_table(firsts)], pairs)
    return summed


def _split_of(total: int, count: int) -> int:
    """UNARY where many elements change, else how many low bytes of long gaps go into planes of their own."""
    mean, k = total // count if count else 0, 0
    if mean < _UNARY_BELOW:
        return UNARY
    while mean >> (8 * k) > MORE:
        k += 1
    return k
