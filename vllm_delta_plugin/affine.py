"""Affine pieces of an index map: which boxes of one array lie in which boxes of another."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Step = tuple[int, int, int]  # size, stride in the one array, stride in the other
Piece = tuple[int, int, list[Step]]  # first element of the one and of the other array, steps from the outermost in


def affine(one: Indices, other: Indices, limit: int) -> list[Piece] | None:
    """The map from ``one[k]`` to ``other[k]``, int64 ``[n]`` each, in boxes; None if it takes more than ``limit``.

    Strides found are positive. A map that only reorders digits of k (blocks, tiles, interleaving) is one box.
    """
    inner: list[Step] = []
    while one.size > 1 and (size := _even(one, other)) > 1:
        inner.insert(0, (size, int(one[1] - one[0]), int(other[1] - other[0])))
        one, other = one[::size], other[::size]
    pieces: list[Piece] = []
    at, turns = 0, _turns(one, other)
    while at < one.size:
        if len(pieces) == limit:
            return None
        steps = []
        if at + 1 < one.size and one[at + 1] > one[at] and other[at + 1] > other[at]:
            end = int(turns[np.searchsorted(turns, at + 1)])
            steps = [(end - at + 1, int(one[at + 1] - one[at]), int(other[at + 1] - other[at]))]
        pieces.append((int(one[at]), int(other[at]), [*steps, *inner]))
        at += steps[0][0] if steps else 1
    return pieces


def _even(one: Indices, other: Indices) -> int:
    """The largest number of elements in which every block of so many goes on by the same step; 1 if there is none."""
    steps = np.diff(one), np.diff(other)
    if steps[0][0] <= 0 or steps[1][0] <= 0:
        return 1
    breaks = np.flatnonzero((steps[0] != steps[0][0]) | (steps[1] != steps[1][0])) + 1
    return int(np.gcd.reduce(np.append(breaks, one.size)))


def _turns(one: Indices, other: Indices) -> npt.NDArray[Any]:
    """The elements after which the step is not the one before them, and the last."""
    steps = np.diff(one), np.diff(other)
    changes = (steps[0][1:] != steps[0][:-1]) | (steps[1][1:] != steps[1][:-1])
    return np.append(np.flatnonzero(changes) + 1, one.size - 1)
