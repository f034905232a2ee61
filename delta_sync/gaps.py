"""Positions as gaps: one byte each, 255 escaping to a variable-length extension.

A gap is the number of unchanged elements before a position: position - previous - 1, with -1 before a tensor's first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.errors import FormatError
from delta_sync.jit import compiled

ESCAPE = 255
_MAX_VARINT = 10


@compiled
def _split(positions: Any, low: Any, extension: Any, used: Any) -> Any:
    """Write one tensor's gaps; returns how much of ``extension`` is used, or -1 if it is full."""
    before = -1
    for i in range(positions.size):
        gap = positions[i] - before - 1
        before = positions[i]
        if gap < ESCAPE:
            low[i] = gap
            continue
        if used + _MAX_VARINT > extension.size:
            return -1
        low[i] = ESCAPE
        gap -= ESCAPE
        while gap >= 128:
            extension[used] = gap & 127 | 128
            gap >>= 7
            used += 1
        extension[used] = gap
        used += 1
    return used


@compiled
def _join(low: Any, extension: Any, used: Any, size: Any, positions: Any) -> Any:
    """Read one tensor's positions; returns how much of ``extension`` is used, or -1 if anything is wrong."""
    at = -1
    for i in range(low.size):
        gap: Any = np.int64(low[i])
        if gap == ESCAPE:
            shift = 0
            while True:
                if used == extension.size or shift > 49:
                    return -1
                byte = np.int64(extension[used])
                used += 1
                gap += (byte & 127) << shift
                shift += 7
                if byte < 128:
                    break
            if byte == 0 and shift > 7:
                return -1
        at += gap + 1
        if at >= size:
            return -1
        positions[i] = at
    return used


def encode_gaps(positions: npt.NDArray[np.int64], counts: Sequence[int]) -> tuple[bytes, bytes]:
    """The gap and extension streams of tensors' positions laid one after the other."""
    low = np.empty(positions.size, np.uint8)
    extension = np.empty(_MAX_VARINT * (int(positions.size) + 1), np.uint8)
    used = 0
    for part in slices(counts):
        used = _split(positions[part], low[part], extension, used)
    return low.tobytes(), extension[:used].tobytes()


def decode_gaps(
    low: bytes, extension: bytes, counts: Sequence[int], sizes: Sequence[int], what: str
) -> npt.NDArray[np.int64]:
    """The inverse of ``encode_gaps``; FormatError unless each tensor's positions stay below its size."""
    gaps, more = np.frombuffer(low, np.uint8), np.frombuffer(extension, np.uint8)
    positions = np.empty(gaps.size, np.int64)
    used = 0
    for part, size in zip(slices(counts), sizes, strict=True):
        used = int(_join(gaps[part], more, used, size, positions[part]))
        if used < 0:
            raise FormatError(what, expected=f"positions below {size}", got="gaps that lead beyond, or no gaps")
    if used != more.size:
        raise FormatError(what, expected=f"{used} bytes of gap extensions", got=more.size)
    return positions


def slices(counts: Sequence[int]) -> Iterator[slice]:
    """Where each tensor's entries lie when they are laid one after the other."""
    at = 0
    for count in counts:
        yield slice(at, at + count)
        at += count
