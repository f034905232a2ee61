"""Laying changes out by class, and reading them back: one pass each, no copy sorted by class."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.context_model import CONTEXTS, class_table
from delta_sync.context_table import UNARY, low_planes
from delta_sync.errors import FormatError
from delta_sync.gaps import MORE
from delta_sync.jit import compiled

_0, _1, _8 = np.uint64(0), np.uint64(1), np.uint64(8)
_MORE, _UNARY, _BYTE = np.uint64(MORE), np.uint64(UNARY), np.uint64(255)

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]


@compiled
def _tally(contexts: Any, gaps: Any, sizes: Any, table: Any, sums: Any, pairs: Any) -> None:
    for k in range(contexts.size):
        context = contexts[k]
        sums[table[context]] += gaps[k]
        pairs[context, sizes[k]] += 1


@compiled
def _spread_gaps(contexts: Any, gaps: Any, table: Any, splits: Any, counts: Any, low: Any, out: Any, at: Any) -> None:
    """``at``: of each class where its bytes go, the next bit of unary ones, and where its next low bytes go.

    ``out`` holds MORE where bytes go, and no bits. No branch depends on a gap, or on the class where classes are alike:
    neither can be predicted. Classes without low bytes write them to a place that nothing else uses.
    """
    at_byte, at_bit, at_low = at
    for k in range(np.uint64(contexts.size)):
        c, gap = np.uint64(table[contexts[k]]), gaps[k]
        split = np.uint64(splits[c])
        if split == _UNARY:
            bit = at_bit[c] + gap
            out[at_byte[c] + (bit >> np.uint64(3))] |= np.uint8(1) << np.uint8(bit & np.uint64(7))
            at_bit[c] = bit + _1
            continue
        place = at_low[c]
        low[place] = gap & _BYTE
        for j in range(_1, split):
            low[place + j * counts[c]] = gap >> _8 * j & _BYTE
        at_low[c] = place + min(split, _1)
        gap >>= _8 * split
        used = at_byte[c] + gap // _MORE
        out[used] = gap % _MORE
        at_byte[c] = used + _1


@compiled
def _spread(contexts: Any, values: Any, table: Any, at: Any, out: Any) -> None:
    for k in range(np.uint64(contexts.size)):
        c = table[contexts[k]]
        out[at[c]] = values[k]
        at[c] += _1


@compiled
def _gather(contexts: Any, values: Any, table: Any, at: Any, out: Any) -> None:
    for k in range(np.uint64(contexts.size)):
        c = table[contexts[k]]
        out[k] = values[at[c]]
        at[c] += _1


@compiled
def _read_gaps(stream: Any, planes: Any, longest: Any, gaps: Any) -> Any:
    """Gaps from one class's bytes and planes ``[planes, n]``; bytes used, or -1 if too few or a gap is too long."""
    used = _0
    for k in range(np.uint64(gaps.size)):
        byte, gap = _MORE, _0
        while byte == _MORE:
            if used == np.uint64(stream.size):
                return -1
            byte = np.uint64(stream[used])
            gap += byte
            used += _1
        if gap > longest >> _8 * np.uint64(planes.shape[0]):
            return -1
        for j in range(planes.shape[0] - 1, -1, -1):
            gap = gap << _8 | np.uint64(planes[j, k])
        gaps[k] = gap
    return np.int64(used)


@compiled
def _read_unary(stream: Any, gaps: Any) -> Any:
    """Gaps from one class's bits; how many ones there are at most one more than gaps, and bytes up to the last."""
    found, last = _0, -1
    for place in range(8 * stream.size):
        if stream[place >> 3] >> np.uint8(place & 7) & np.uint8(1):
            if found == np.uint64(gaps.size):
                return -1
            gaps[found] = np.uint64(place - last - 1)
            found, last = found + _1, place
    return last // 8 + 1 if found == np.uint64(gaps.size) else -1


def tally(contexts: Bytes, gaps: Words, sizes: Bytes, firsts: Sequence[int]) -> tuple[Words, npt.NDArray[np.int64]]:
    """The sum of each class's gaps, and how often each context has each size, int64 ``[256, 256]``."""
    sums, pairs = np.zeros(len(firsts), np.uint64), np.zeros((CONTEXTS, CONTEXTS), np.int64)
    _tally(contexts, gaps, sizes, class_table(firsts), sums, pairs)
    return sums, pairs


def spread_gaps(
    contexts: Bytes, gaps: Words, firsts: Sequence[int], splits: Sequence[int], counts: Words, sums: Words
) -> tuple[list[Bytes], list[Bytes]]:
    """The gap bytes of each class, and its low planes, class after class."""
    planes = [low_planes(split) for split in splits]
    widths = [
        -(-int(n + total) // 8) if split == UNARY else int(n) + (int(total) >> 8 * split) // MORE
        for n, total, split in zip(counts, sums, splits, strict=True)
    ]  # the most bytes that a class takes
    starts, lows = _starts(widths), _starts([k * int(n) for k, n in zip(planes, counts, strict=True)])
    out = np.full(sum(widths), MORE, np.uint8)
    for begin, width, split in zip(starts, widths, splits, strict=True):
        if split == UNARY:
            out[int(begin) :][:width] = 0
    low = np.empty(int(counts @ np.array(planes, np.uint64)) + 1, np.uint8)
    unused = np.uint64(low.size - 1)
    at = starts.copy(), np.zeros(len(firsts), np.uint64), np.where(np.array(planes) == 0, unused, lows)
    _spread_gaps(contexts, gaps, class_table(firsts), np.array(splits, np.uint8), counts, low, out, at)
    ends = [
        begin + width if split == UNARY else end
        for begin, end, width, split in zip(starts, at[0], widths, splits, strict=True)
    ]
    content = [out[int(a) : int(b)] for a, b in zip(starts, ends, strict=True)]
    return content, [
        low[int(a) + j * int(n) :][: int(n)] for a, k, n in zip(lows, planes, counts, strict=True) for j in range(k)
    ]


def spread(contexts: Bytes, values: Bytes, firsts: Sequence[int], counts: Sequence[int]) -> list[Bytes]:
    """The values of each class, in their order."""
    starts, out = _starts(counts), np.empty(contexts.size, np.uint8)
    _spread(contexts, values, class_table(firsts), starts.copy(), out)
    return [out[int(a) :][:n] for a, n in zip(starts, counts, strict=True)]


def gather(contexts: Bytes, contents: Sequence[bytes], firsts: Sequence[int]) -> Bytes:
    """The inverse of ``spread``: ``contents`` holds just what each class needs."""
    out = np.empty(contexts.size, np.uint8)
    values = np.frombuffer(b"".join(contents), np.uint8)
    _gather(contexts, values, class_table(firsts), _starts(list(map(len, contents))), out)
    return out


def read_gaps(content: bytes, planes: Sequence[bytes], split: int, longest: int, out: Words, what: str) -> None:
    """One class's gaps, ``out``; FormatError unless the content holds just so many, none above ``longest``."""
    stream = np.frombuffer(content, np.uint8)
    if split == UNARY:
        used = _read_unary(stream, out)
        if used >= 0 and (out > longest).any():
            used = -1
    else:
        low = np.frombuffer(b"".join(planes), np.uint8).reshape(split, out.size)
        used = _read_gaps(stream, low, np.uint64(longest), out)
    if used != stream.size:
        expected = f"{out.size} of at most {longest}" + (", the last one in the last byte" if split == UNARY else "")
        raise FormatError(what, expected=expected, got=f"{stream.size} bytes that hold others")


def _starts(widths: Sequence[int]) -> Words:
    return np.cumsum([0, *widths[:-1]]).astype(np.uint64)
