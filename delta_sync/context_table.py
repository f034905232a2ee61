"""The table at the head of a context-coded group: classes, how gaps are split, and where frames end."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal

from delta_sync.errors import FormatError

MOST_PARTS = 256
MOST_LOW, UNARY = 5, 255
_HEAD = struct.Struct("<BBHH")  # classes, step classes, parts along rows and columns


def low_planes(split: int) -> int:
    """How many planes a class's gaps have."""
    return 0 if split == UNARY else split


@dataclass(frozen=True)
class Table:
    """How one group is coded.

    grid: parts that tensors are cut into (context_model.tiles). firsts, step_firsts: first contexts of the classes for
    positions and steps. splits: of each class, how many low bytes of a gap are planes, or UNARY. gap, low, step: sizes
    of frames.
    """

    MOST_BYTES: ClassVar[int] = _HEAD.size + 255 * (2 + 1 + 8 + 8 * MOST_LOW + 8)

    grid: tuple[int, int]
    firsts: tuple[int, ...]
    splits: tuple[int, ...]
    step_firsts: tuple[int, ...]
    gap: tuple[int, ...]
    low: tuple[int, ...]
    step: tuple[int, ...]

    def to_bytes(self) -> bytes:
        """The table's content on the wire."""
        head = _HEAD.pack(len(self.firsts), len(self.step_firsts), *self.grid)
        lengths = (*self.gap, *self.low, *self.step)
        return (
            head + bytes((*self.firsts, *self.splits, *self.step_firsts)) + struct.pack(f"<{len(lengths)}Q", *lengths)
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str) -> Table:
        """The inverse of ``to_bytes``; FormatError."""
        if len(data) < _HEAD.size:
            raise FormatError(what, expected=f"at least {_HEAD.size} bytes", got=len(data))
        classes, step_classes, *grid = _HEAD.unpack_from(data)
        at = _HEAD.size + 2 * classes + step_classes
        small = data[_HEAD.size : at]
        firsts, splits, step_firsts = small[:classes], small[classes : 2 * classes], small[2 * classes :]
        if len(small) != 2 * classes + step_classes or any(k > MOST_LOW and k != UNARY for k in splits):
            raise FormatError(
                what, expected=f"classes with a split of 0 to {MOST_LOW} or {UNARY}", got=small.hex()[:60]
            )
        for contexts in (firsts, step_firsts):
            if not contexts or contexts[0] or any(a >= b for a, b in pairwise(contexts)):
                raise FormatError(what, expected="contexts that rise from 0", got=list(contexts)[:20])
        if not all(1 <= parts <= MOST_PARTS for parts in grid):
            raise FormatError(what, expected=f"1 to {MOST_PARTS} parts along each axis", got=grid)
        counts = (classes, sum(map(low_planes, splits)), step_classes)
        if len(data) != at + 8 * sum(counts):
            raise FormatError(what, expected=f"{at + 8 * sum(counts)} bytes", got=len(data))
        lengths = iter(struct.unpack_from(f"<{sum(counts)}Q", data, at))
        gap, low, step = (tuple(next(lengths) for _ in range(n)) for n in counts)
        return cls((grid[0], grid[1]), tuple(firsts), tuple(splits), tuple(step_firsts), gap, low, step)

    def frames(self, name: Literal["gap", "low", "step"], streams: Mapping[str, memoryview]) -> Iterator[memoryview]:
        """The frames that a stream holds one after the other."""
        lengths: tuple[int, ...] = {"gap": self.gap, "low": self.low, "step": self.step}[name]
        at = 0
        for length in lengths:
            yield streams[name][at : at + length]
            at += length
