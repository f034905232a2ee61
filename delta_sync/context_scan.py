"""The two passes over a tensor's bits: finding what changed as gaps within a class, and finding it again.

Both count the elements of each class a block at a time, by loops of fixed length over bytes that compile to vector
instructions, and look closer only at blocks in which something changed. Blocks are no part of the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits, masks, ordinal
from delta_sync.context_model import Tile, class_table, field
from delta_sync.delta import differs
from delta_sync.dtypes import DType
from delta_sync.jit import compiled

# Indices are unsigned: that spares the loops numba's handling of negative ones.
_BLOCK, _PART = np.uint64(128), np.uint64(64)
_0, _1 = np.uint64(0), np.uint64(1)
_NEVER = np.uint64(2**62)


@compiled
def _contexts(bits: Any, at: Any, size: Any, shift: Any, mask: Any, out: Any) -> None:
    """Contexts of one block; those beyond ``size`` are the highest, so that only the last class holds them."""
    if size == _BLOCK:
        for i in range(_BLOCK):
            out[i] = np.uint8((bits[at + i] >> shift) & mask)
    else:
        out[:] = 255
        for i in range(size):
            out[i] = np.uint8((bits[at + i] >> shift) & mask)


@compiled
def _below(contexts: Any, first: Any) -> Any:
    total = np.uint8(0)
    for i in range(_BLOCK):
        total = np.uint8(total + np.uint8(contexts[i] < first))
    return np.uint64(total)


@compiled
def _changed_in(old: Any, new: Any, at: Any, size: Any, out: Any, found: Any) -> Any:
    """Append to ``out[:found]`` the places in a block at which it differs; returns how many there are then."""
    for part in range(_0, size, _PART):
        end = min(part + _PART, size)
        if end - part < _PART or differs(old[at + part : at + end], new[at + part : at + end]):
            for i in range(part, end):
                out[found] = i
                found += np.uint64(old[at + i] != new[at + i])
    return found


@compiled
def _before(contexts: Any, end: Any, first: Any, span: Any, ramp: Any) -> Any:
    """How many of a block's first ``end`` contexts are in the class that has ``span`` + 1 contexts from ``first``.

    ``ramp`` is a block of ones, then a block of zeros.
    """
    total = np.uint8(0)
    for i in range(_BLOCK):
        total = np.uint8(total + (np.uint8(np.uint8(contexts[i] - first) <= span) & ramp[_BLOCK - end + i]))
    return np.uint64(total)


@compiled
def _scan(
    old: Any, new: Any, start: Any, stride: Any, rows: Any, length: Any, firsts: Any, table: Any, how: Any
) -> Any:
    """Positions, gaps, contexts and steps of one tile's changes."""
    shift, mask, sign, flip = how
    classes = np.uint64(firsts.size)
    seen, free = (
        np.zeros(classes, np.uint64),
        np.zeros(classes, np.uint64),
    )  # elements before, and after the last change
    contexts, ramp = np.empty(_BLOCK, np.uint8), np.zeros(2 * _BLOCK, np.uint8)
    ramp[:_BLOCK] = 1
    capacity = rows * length // np.uint64(64) + _BLOCK
    positions, gaps = np.empty(capacity, np.int64), np.empty(capacity, np.uint64)
    where, steps = np.empty(capacity, np.uint8), np.empty(capacity, old.dtype)
    found = _0
    for row in range(rows):
        begin = start + row * stride
        for at in range(begin, begin + length, _BLOCK):
            size = min(_BLOCK, begin + length - at)
            _contexts(old, at, size, shift, mask, contexts)
            if found + _BLOCK > capacity:
                positions, gaps = _grown(positions, found), _grown(gaps, found)
                where, steps = _grown(where, found), _grown(steps, found)
                capacity = np.uint64(positions.size)
            first, found = found, _changed_in(old, new, at, size, positions, found)
            for k in range(first, found):
                i: Any = np.uint64(positions[k])
                c = np.uint64(table[contexts[i]])
                end = np.uint8(255) if c + _1 == classes else np.uint8(firsts[c + _1] - 1)
                rank = seen[c] + _before(contexts, i, firsts[c], np.uint8(end - firsts[c]), ramp)
                gaps[k], free[c] = rank - free[c], rank + _1
                positions[k], where[k] = at + i, contexts[i]
                one, other = np.uint64(new[at + i]), np.uint64(old[at + i])
                steps[k] = ordinal(one, sign, flip) - ordinal(other, sign, flip)
            below = _0
            for later in range(_1, classes):
                upto = _below(contexts, firsts[later])
                seen[later - _1] += upto - below
                below = upto
            seen[classes - _1] += size - below
    return positions[:found].copy(), gaps[:found].copy(), where[:found].copy(), steps[:found].copy()


@compiled
def _grown(values: Any, used: Any) -> Any:
    out = np.empty(2 * values.size, values.dtype)
    out[:used] = values[:used]
    return out


@compiled
def _members(contexts: Any, first: Any, span: Any, out: Any) -> None:
    """Where a block's elements of one class are."""
    found = _0
    for i in range(_BLOCK):
        out[found] = i
        found += np.uint64(np.uint8(contexts[i] - first) <= span)


@compiled
def _select(
    bits: Any, start: Any, stride: Any, rows: Any, length: Any, firsts: Any, how: Any, left: Any, gaps: Any,
    at_gap: Any, positions: Any,
) -> Any:  # fmt: skip
    """Positions of one tile's changes, from each class's gaps at ``at_gap``; False if they lead beyond the tile."""
    shift, mask = how
    classes = np.uint64(firsts.size)
    contexts, members = np.empty(_BLOCK, np.uint8), np.empty(_BLOCK + _1, np.uint8)
    ahead = np.full(classes, _NEVER)  # elements of a class before its next change
    for c in range(classes):
        if left[c]:
            ahead[c] = gaps[at_gap[c]]
    found = _0
    for row in range(rows):
        begin = start + row * stride
        for at in range(begin, begin + length, _BLOCK):
            size = min(_BLOCK, begin + length - at)
            _contexts(bits, at, size, shift, mask, contexts)
            first, kinds, below = found, _0, _0
            for c in range(classes):
                upto = size if c + _1 == classes else _below(contexts, firsts[c + _1])
                here = upto - below
                below = upto
                to = ahead[c]
                if to >= here:
                    ahead[c] = to - here
                    continue
                end = np.uint8(255) if c + _1 == classes else np.uint8(firsts[c + _1] - 1)
                _members(contexts, firsts[c], np.uint8(end - firsts[c]), members)
                next_gap = at_gap[c]
                while to < here:
                    positions[found] = at + np.uint64(members[to])
                    found += _1
                    next_gap += _1
                    left[c] -= _1
                    to = to + _1 + gaps[next_gap] if left[c] else _NEVER
                at_gap[c] = next_gap
                ahead[c] = to - here
                kinds += _1
            if kinds > _1:
                _sort(positions, first, found)
    missing = _0
    for c in range(classes):
        missing += left[c]
    return missing == _0


@compiled
def _sort(positions: Any, first: Any, end: Any) -> None:
    """Sort a few positions of one block."""
    for i in range(first + _1, end):
        value = positions[i]
        k: Any = i
        while k > first and positions[k - _1] > value:
            positions[k] = positions[k - _1]
            k -= _1
        positions[k] = value


Found = tuple[npt.NDArray[np.int64], npt.NDArray[np.uint64], npt.NDArray[np.uint8], Bits]


def scan(old: Bits, new: Bits, dtype: DType, tile: Tile, firsts: list[int]) -> Found:
    """What changed in one tile of flat bits: positions, gaps within the classes, contexts, ULP steps; all ``[n]``."""
    how = (*_how(dtype), *masks(dtype))
    found: Found = _scan(old, new, *_place(tile), np.asarray(firsts, np.uint8), class_table(firsts), how)
    return found


def select(
    bits: Bits,
    dtype: DType,
    tile: Tile,
    firsts: list[int],
    counts: npt.NDArray[np.uint64],
    gaps: npt.NDArray[np.uint64],
    at_gap: npt.NDArray[np.uint64],
    out: npt.NDArray[np.int64],
) -> bool:
    """Write the positions of one tile's changes, ``counts[c]`` of class c with gaps from ``gaps[at_gap[c]]`` on.

    ``out`` has room for just these; ``at_gap`` is moved on. No gap exceeds the tensors. False if they lead beyond.
    """
    return bool(
        _select(bits, *_place(tile), np.asarray(firsts, np.uint8), _how(dtype), counts.copy(), gaps, at_gap, out)
    )


def contexts_of(bits: Bits, dtype: DType) -> npt.NDArray[np.uint8]:
    """The context of each element, uint8."""
    shift, mask = _how(dtype)
    contexts: npt.NDArray[np.uint8] = ((bits >> shift) & mask).astype(np.uint8)
    return contexts


def _how(dtype: DType) -> tuple[np.unsignedinteger, np.unsignedinteger]:
    shift, mask = field(dtype)
    return dtype.carrier.type(shift), dtype.carrier.type(mask)


def _place(tile: Tile) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    return np.uint64(tile.start), np.uint64(tile.stride), np.uint64(tile.rows), np.uint64(tile.length)
