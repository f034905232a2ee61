"""What the context codec conditions on: a small number read from an element's old bits, and classes of such numbers.

The context of a float is its exponent field: an optimizer moves weights by about as much, so small weights, whose
neighbours are near, change often and far, and large ones seldom and by one step. Classes are runs of contexts whose
elements share statistics; the writer chooses them and writes them down, so a reader computes with integers alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_sync.dtypes import DType

CONTEXTS = 256
_EXPONENT = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Tile:
    """A rectangle of a tensor seen as a matrix: ``rows`` runs of ``length`` elements, ``stride`` apart."""

    start: int
    stride: int
    rows: int
    length: int

    @property
    def elements(self) -> int:
        """How many elements the tile has."""
        return self.rows * self.length


def field(dtype: DType) -> tuple[int, int]:
    """Shift and mask that give an element's context, 0 to 255, from its bits; integers all have context 0."""
    shift, width = _EXPONENT.get(dtype.name, (0, 0))
    return shift, (1 << width) - 1


def tiles(shape: Sequence[int], grid: tuple[int, int]) -> Iterator[Tile]:
    """The tiles of a tensor, row by row: ``grid`` is the number of parts along all axes but the last, and along it."""
    columns = shape[-1] if len(shape) > 1 else 1
    rows = math.prod(shape[:-1]) if len(shape) > 1 else math.prod(shape)
    if not rows * columns:
        return
    for top, bottom in _parts(rows, grid[0]):
        for left, right in _parts(columns, grid[1]):
            if right - left == columns:  # whole rows lie one after the other: one long run
                yield Tile(top * columns, 0, 1, (bottom - top) * columns)
            else:
                yield Tile(top * columns + left, columns, bottom - top, right - left)


def _parts(size: int, parts: int) -> Iterator[tuple[int, int]]:
    parts = min(parts, size)
    for k in range(parts):
        yield k * size // parts, (k + 1) * size // parts


def choose_classes(counts: Counts, most: int, class_bits: int) -> list[int]:
    """First contexts of the classes that code ``counts`` ``[contexts, symbols]`` best: at most ``most`` of them.

    Starts from one class a context and merges neighbours while that costs less than ``class_bits``, what a class
    takes on the wire, or while there are too many.
    """
    firsts = np.flatnonzero(counts.any(axis=1)).tolist()
    rows = counts[firsts][:, counts.any(axis=0)].astype(np.float64)
    alone, joint = _bits(rows), _bits(rows[:-1] + rows[1:])
    while len(rows) > 1:
        extra = joint - alone[:-1] - alone[1:]
        at = int(extra.argmin())
        if len(rows) <= most and extra[at] > class_bits:
            break
        rows[at] += rows[at + 1]
        alone[at] = joint[at]
        rows, alone, joint = (np.delete(a, k, axis=0) for a, k in ((rows, at + 1), (alone, at + 1), (joint, at)))
        del firsts[at + 1]
        for k in range(max(at - 1, 0), min(at + 1, len(joint))):  # the pairs that the merged class is now part of
            joint[k] = _bits(rows[k : k + 1] + rows[k + 1 : k + 2])[0]
    return [0, *firsts[1:]]


def entropy_bits(counts: Counts) -> float:
    """Bits that symbols with these counts ``[contexts, symbols]`` take in an ideal code for each context."""
    return float(_bits(counts.astype(np.float64)).sum())


def _bits(counts: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    total = counts.sum(axis=1, keepdims=True)
    share = counts / np.maximum(total, 1)
    bits: npt.NDArray[np.float64] = -(counts * np.log2(np.where(share > 0, share, 1))).sum(axis=1)
    return bits


def class_table(firsts: Sequence[int]) -> npt.NDArray[np.uint8]:
    """The class of each context, uint8 ``[256]``."""
    table = np.searchsorted(np.asarray(firsts), np.arange(CONTEXTS), side="right") - 1
    return table.astype(np.uint8)
