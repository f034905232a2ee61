"""The passes over a tensor's bits: finding what changed as gaps within a class, and finding it again.

They look at a block of 64 elements at once, as words with a bit for each (lanes.py): which changed, and which have a
context below a class's first. Counting a class's elements is then counting bits. Blocks are no part of the format.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from delta_sync.bitmap import ordinal
from delta_sync.jit import compiled, inlined
from delta_sync.lanes import LANES, below, first_ones, lowest, narrow, ones, place_of, unequal

# Indices are unsigned: that spares the loops numba's handling of negative ones.
_0, _1 = np.uint64(0), np.uint64(1)
_NEVER = np.uint64(2**62)


@inlined
def _contexts(bits: Any, at: Any, size: Any, shift: Any, mask: Any, out: Any) -> None:
    """Contexts of one block; those beyond ``size`` are the highest, so that only the last class holds them."""
    if size == LANES:
        narrow(bits, at, shift, mask, out)
    else:
        out[:] = 255
        for i in range(size):
            out[i] = np.uint8((bits[at + i] >> shift) & mask)


@inlined
def _unequal(old: Any, new: Any, at: Any, size: Any) -> Any:
    """The places in one block at which it changed."""
    if size == LANES:
        return unequal(old, new, at)
    word = _0
    for i in range(size):
        word |= np.uint64(old[at + i] != new[at + i]) << i
    return word


@inlined
def _count(block: Any, size: Any, firsts: Any, under: Any, seen: Any) -> None:
    """Of one block: ``under[c]`` are the places whose context is below class c; ``seen[c]`` counts them over all."""
    classes = np.uint64(firsts.size)
    for c in range(_1, classes):
        word = below(block, firsts[c])
        under[c] = word
        seen[c] += ones(word)
    under[classes] = first_ones(size)
    seen[classes] += size


@inlined
def _gap(i: Any, c: Any, under: Any, seen: Any, free: Any, counts: Any) -> Any:
    """The gap of the change at place ``i`` of a block, whose class is ``c``; counts it."""
    rank = seen[c + _1] - seen[c] - ones((under[c + _1] ^ under[c]) >> i)
    gap = rank - free[c]
    free[c] = rank + _1
    counts[c] += _1
    return gap


@compiled
def scan(old: Any, new: Any, place: Any, how: Any, classes: Any, state: Any, out: Any) -> Any:
    """Positions, ULP steps, gaps and contexts of a tile's changes, from ``out[used]`` on; True once all are there.

    place: start, stride, rows, length. how: shift and mask of contexts, sign and flip of ordinals. classes: their first
    contexts, and the class of each context. state: row, element and used entries to begin with, moved on; and of each
    class elements seen ``[+ 1]``, elements up to the last change, changes. False: no room for a block's worst case.
    """
    start, stride, rows, length = place
    shift, mask, sign, flip = how
    firsts, table = classes
    at_end, seen, free, counts = state
    positions, steps, gaps, contexts = out
    block, under = np.empty(LANES, np.uint8), np.zeros(seen.size, np.uint64)
    first, k, room = at_end[1], at_end[2], np.uint64(positions.size)
    for row in range(at_end[0], rows):
        begin = start + row * stride
        for at in range(begin + first, begin + length, LANES):
            if k + LANES > room:
                at_end[0], at_end[1], at_end[2] = row, at - begin, k
                return False
            size = min(LANES, begin + length - at)
            changed = _unequal(old, new, at, size)  # first: a processor that guesses the branch wrong learns it sooner
            _contexts(old, at, size, shift, mask, block)
            _count(block, size, firsts, under, seen)
            while changed:
                i = lowest(changed)
                changed &= changed - _1
                one, other = np.uint64(new[at + i]), np.uint64(old[at + i])
                context = np.uint8((old[at + i] >> shift) & mask)  # block[i] was just written, as part of a vector
                contexts[k] = context
                gaps[k] = _gap(i, np.uint64(table[context]), under, seen, free, counts)
                positions[k] = at + i
                steps[k] = ordinal(one, sign, flip) - ordinal(other, sign, flip)
                k += _1
        first = _0
    at_end[2] = k
    return True


@compiled
def rank(old: Any, positions: Any, place: Any, how: Any, classes: Any, state: Any, gaps: Any, contexts: Any) -> None:
    """Gaps and contexts, ``[n]``, of a tile's changes at ``positions``; the rest is as in ``scan``."""
    start, stride, rows, length = place
    shift, mask = how
    firsts, table = classes
    seen, free, counts = state
    block, under = np.empty(LANES, np.uint8), np.zeros(seen.size, np.uint64)
    k, n = _0, np.uint64(positions.size)
    for row in range(rows):
        begin = start + row * stride
        for at in range(begin, begin + length, LANES):
            if k == n:
                return
            size = min(LANES, begin + length - at)
            _contexts(old, at, size, shift, mask, block)
            _count(block, size, firsts, under, seen)
            while k < n and np.uint64(positions[k]) < at + size:
                i = np.uint64(positions[k]) - at
                contexts[k] = block[i]
                gaps[k] = _gap(i, np.uint64(table[block[i]]), under, seen, free, counts)
                k += _1


@compiled
def select(bits: Any, place: Any, how: Any, firsts: Any, left: Any, gaps: Any, next_gaps: Any, out: Any) -> Any:
    """Positions and contexts, ``out``, of a tile's changes: ``left[c]`` of class c, by ``gaps[next_gaps[c]]`` and on.

    Both are moved on. False if the gaps, none of which exceeds the tensors, lead beyond the tile.
    """
    start, stride, rows, length = place
    shift, mask = how
    positions, contexts = out
    classes = np.uint64(firsts.size)
    block, under = np.empty(LANES, np.uint8), np.zeros(classes + _1, np.uint64)
    seen, due = np.zeros(classes + _1, np.uint64), np.full(classes, _NEVER)  # due: rank of the next change in its class
    for c in range(classes):
        if left[c]:
            due[c] = gaps[next_gaps[c]]
    k = _0
    for row in range(rows):
        begin = start + row * stride
        for at in range(begin, begin + length, LANES):
            size = min(LANES, begin + length - at)
            _contexts(bits, at, size, shift, mask, block)
            changed, reached, before = _0, _0, _0
            for c in range(
                _1, classes
            ):  # as _count does; bit c % 64 of ``reached`` is set if a change of class c is due
                word = below(block, firsts[c])
                upto = seen[c] + ones(word)
                under[c], seen[c] = word, upto
                reached |= np.uint64(due[c - _1] < upto - before) << (c - _1) % LANES
                before = upto
            under[classes] = first_ones(size)
            seen[classes] += size
            reached |= np.uint64(due[classes - _1] < seen[classes] - before) << (classes - _1) % LANES
            while reached:
                some = lowest(reached)
                reached &= reached - _1
                for c in range(some, classes, LANES):
                    here, upto = under[c + _1] ^ under[c], seen[c + _1] - seen[c]
                    before, to, at_gap = upto - ones(here), due[c], next_gaps[c]
                    while to < upto:
                        changed |= _1 << place_of(here, to - before)
                        at_gap += _1
                        left[c] -= _1
                        to = to + _1 + gaps[at_gap] if left[c] else _NEVER
                    due[c], next_gaps[c] = to, at_gap
            while changed:
                i = lowest(changed)
                changed &= changed - _1
                positions[k], contexts[k] = at + i, block[i]
                k += _1
    return left.sum() == _0


@compiled
def tell(old: Any, new: Any, shift: Any, mask: Any, counts: Any) -> None:
    """Add to ``counts[context, changed]`` what became of each element."""
    for i in range(old.size):
        counts[(old[i] >> shift) & mask, np.uint64(old[i] != new[i])] += 1
