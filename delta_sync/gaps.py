"""Positions as gaps, in bytes: 255 means "255 more, and go on", any other byte ends a gap.

A gap is the number of unchanged elements before a position: position - previous - 1, with -1 before a tensor's first.
Changes fall about evenly, so what is left of a gap after 255 is spread like a gap itself: the same byte statistics
serve, one stream suffices, and an order-0 coder comes within a percent of the bound (measured: benchmarks/).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.errors import FormatError
from delta_sync.jit import compiled

MORE = 255
_0, _1, _MORE = np.uint64(0), np.uint64(1), np.uint64(MORE)  # unsigned indices: see context_scan.py


@compiled
def _write(positions: Any, ends: Any, out: Any) -> Any:
    """Write all gaps, of tensors whose positions end at entries ``ends``, over bytes of MORE; returns how many."""
    k, used = _0, _0
    for t in range(ends.size):
        free = _0
        while k < ends[t]:
            gap = positions[k] - free
            free = positions[k] + _1
            used += gap // _MORE  # no branch: how long a gap is can't be predicted
            out[used] = gap % _MORE
            used += _1
            k += _1
    return used


@compiled
def _read(gaps: Any, used: Any, size: Any, positions: Any) -> Any:
    """Read one tensor's positions from ``gaps[used]`` on; returns where the next begin, or -1 if they don't fit."""
    at = -1
    for i in range(positions.size):
        byte: Any = MORE
        while byte == MORE:
            if used == gaps.size:
                return -1
            byte = np.int64(gaps[used])
            at += byte
            used += 1
        at += 1
        if at >= size:
            return -1
        positions[i] = at
    return used


def encode_gaps(positions: npt.NDArray[np.int64], counts: Sequence[int]) -> bytes:
    """The gap stream of tensors' positions, laid one after the other: ``counts[k]`` belong to tensor k."""
    ends = np.cumsum(counts, dtype=np.uint64)
    furthest = sum(int(positions[end - 1]) + 1 for end, count in zip(ends.tolist(), counts, strict=True) if count)
    out = np.full(positions.size + furthest // MORE, MORE, np.uint8)
    used = int(_write(positions.view(np.uint64), ends, out))
    return out[:used].tobytes()


def decode_gaps(stream: bytes, counts: Sequence[int], sizes: Sequence[int], what: str) -> npt.NDArray[np.int64]:
    """The inverse of ``encode_gaps``; FormatError unless tensor k's positions stay below ``sizes[k]``."""
    gaps = np.frombuffer(stream, np.uint8)
    positions = np.empty(sum(counts), np.int64)
    used = 0
    for part, size in zip(slices(counts), sizes, strict=True):
        used = int(_read(gaps, used, size, positions[part]))
        if used < 0:
            raise FormatError(what, expected=f"positions below {size}", got="gaps that lead beyond, or too few")
    if used != gaps.size:
        raise FormatError(what, expected=f"{used} bytes", got=gaps.size)
    return positions


@compiled
def _write_values(gaps: Any, out: Any) -> Any:
    used = _0
    for i in range(gaps.size):
        used += gaps[i] // _MORE
        out[used] = gaps[i] % _MORE
        used += _1


@compiled
def _read_values(stream: Any, gaps: Any) -> Any:
    """Returns the bytes used, or -1 if there are too few."""
    used = 0
    for i in range(gaps.size):
        byte: Any = MORE
        gap = np.uint64(0)
        while byte == MORE:
            if used == stream.size:
                return -1
            byte = np.int64(stream[used])
            gap += np.uint64(byte)
            used += 1
        gaps[i] = gap
    return used


def encode_gap_values(gaps: npt.NDArray[np.uint64]) -> bytes:
    """The bytes of gaps, uint64 ``[n]``, that are known themselves and not by their positions."""
    out = np.full(gaps.size + int((gaps // _MORE).sum()), MORE, np.uint8)
    _write_values(gaps, out)
    return out.tobytes()


def decode_gap_values(stream: bytes, count: int, what: str) -> npt.NDArray[np.uint64]:
    """The inverse of ``encode_gap_values``; FormatError unless the stream holds just ``count`` gaps."""
    gaps = np.empty(count, np.uint64)
    used = int(_read_values(np.frombuffer(stream, np.uint8), gaps))
    if used != len(stream):
        raise FormatError(what, expected=f"{count} gaps", got=f"{len(stream)} bytes that hold fewer or more")
    return gaps


def longest(counts: Sequence[int], sizes: Sequence[int]) -> int:
    """The most bytes a gap stream can have for such tensors."""
    return sum(counts) + sum(size // MORE for size in sizes)


def slices(counts: Sequence[int]) -> Iterator[slice]:
    """Where each tensor's entries lie when they are laid one after the other."""
    at = 0
    for count in counts:
        yield slice(at, at + count)
        at += count
