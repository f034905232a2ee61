"""Following checkpoint elements through copies that only rearrange them, such as ``w.transpose(0, 1).reshape(...)``."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

Ints = tuple[int, ...]
Dim = tuple[int, int, int]  # size, stride over the rearranged tensor's memory, stride over something else's


@dataclass(frozen=True)
class Rearranged:
    """Memory that holds elements of checkpoint tensor ``source`` in the row-major order of a box of it.

    The box is ``shape`` elements at ``offset``, ``strides`` apart; all in elements of the checkpoint tensor.
    """

    source: str
    shape: Ints
    offset: int
    strides: Ints

    @classmethod
    def untouched(cls, source: str, shape: Ints) -> Rearranged:
        """The checkpoint tensor itself."""
        return cls(source, (math.prod(shape),), 0, (1,))

    def follow(self, offset: int, dims: Iterable[Dim]) -> tuple[int, list[Dim]] | None:
        """Where a view of this memory reads the checkpoint tensor: offset, and (size, checkpoint stride, other stride).

        A dimension of the view that spans several of the box is split. None if no strides describe it.
        """
        steps = _contiguous(self.shape)
        start = [offset // step % size for size, step in zip(self.shape, steps, strict=True)]
        reach = list(start)
        out: list[Dim] = []
        todo = [dim for dim in dims if dim[0] != 1]
        while todo:
            size, stride, other = todo.pop()
            if not stride:  # the same elements again and again
                out.append((size, 0, other))
                continue
            axis = next((a for a in range(len(steps)) if self.shape[a] > 1 and steps[a] <= stride), None)
            if axis is None or stride % steps[axis]:
                return None
            by = stride // steps[axis]
            row = self.shape[axis] // by
            if reach[axis] + (size - 1) * by >= self.shape[axis]:
                if row < 2 or self.shape[axis] % by or size % row or start[axis] >= by:
                    return None
                todo.append((size // row, stride * row, other * row))
                size = row
            reach[axis] += (size - 1) * by
            if reach[axis] >= self.shape[axis]:
                return None
            out.append((size, by * self.strides[axis], other))
        return self.offset + sum(i * s for i, s in zip(start, self.strides, strict=True)), out

    def copied(self, offset: int, dims: Iterable[Dim]) -> Rearranged | None:
        """What a copy of a view holds, the copy's strides being ``other``; None if it cannot be followed."""
        found = self.follow(offset, dims)
        if found is None:
            return None
        at, parts = found
        ordered = sorted(parts, key=lambda dim: -dim[2])
        shape = tuple(size for size, _, _ in ordered)
        if tuple(other for _, _, other in ordered) != _contiguous(shape):
            return None
        return Rearranged(self.source, shape, at, tuple(stride for _, stride, _ in ordered))


def _contiguous(shape: Ints) -> Ints:
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
