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

from delta_sync.codec import Content
from delta_sync.errors import FormatError
from delta_sync.jit import compiled

MORE = 255


@compiled
def _bytes_needed(positions: Any) -> Any:
    """Bytes that one tensor's gaps take."""
    total, before = positions.size, -1
    for i in range(positions.size):
        total += (positions[i] - before - 1) // MORE
        before = positions[i]
    return total


@compiled
def _write(positions: Any, out: Any, used: Any) -> Any:
    """Write one tensor's gaps from ``out[used]`` on; returns where the next tensor's begin."""
    before = -1
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        while gap >= MORE:
            out[used] = MORE
            gap -= MORE
            used += 1
        out[used] = gap
        used += 1
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
    out = np.empty(sum(_bytes_needed(positions[part]) for part in slices(counts)), np.uint8)
    used = 0
    for part in slices(counts):
        used = _write(positions[part], out, used)
    return out.tobytes()


def decode_gaps(stream: Content, counts: Sequence[int], sizes: Sequence[int], what: str) -> npt.NDArray[np.int64]:
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
    used = np.uint64(0)
    for i in range(gaps.size):
        gap = gaps[i]
        while gap >= np.uint64(MORE):
            out[used] = MORE
            gap -= np.uint64(MORE)
            used += np.uint64(1)
        out[used] = gap
        used += np.uint64(1)
    return used


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
    out = np.empty(gaps.size + int((gaps // np.uint64(MORE)).sum()), np.uint8)
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
