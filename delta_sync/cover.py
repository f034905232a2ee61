"""Whether parts of a tensor, laid over several ranks, cover it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from delta_sync.errors import MappingError


class Region(Protocol):
    """A part of one tensor: row-major flat positions ``offset + sum(index * strides)`` over ``shape``."""

    @property
    def offset(self) -> int:
        """Position of its first element."""

    @property
    def strides(self) -> tuple[int, ...]:
        """Steps between positions along each axis."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""


def check_cover(name: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    """MappingError unless the regions cover every element of the tensor exactly once."""
    starts, ends = _runs(regions)
    size = int(np.prod(shape, dtype=np.int64))
    edges = np.concatenate(([0], ends))
    if not np.array_equal(edges, np.concatenate((starts, [size]))):
        raise MappingError(
            f"regions of tensor {name!r} on all ranks",
            expected=f"each of its {size} elements exactly once",
            got="gaps or overlaps",
            remedy="this parallel layout is not supported",
        )


def _runs(regions: Sequence[Region]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Start and end of every contiguous run of positions, sorted by start."""
    pieces = [_region_runs(region) for region in regions]
    if not pieces:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    starts = np.concatenate([s for s, _ in pieces])
    ends = np.concatenate([s + n for s, n in pieces])
    order = np.argsort(starts, kind="stable")
    return starts[order], ends[order]


def _region_runs(region: Region) -> tuple[npt.NDArray[np.int64], int]:
    dims = sorted((s, n) for s, n in zip(region.strides, region.shape, strict=True) if n != 1)
    run = 1
    while dims and dims[0][0] == run:  # the innermost dimensions that follow each other without a hole
        run *= dims.pop(0)[1]
    starts = np.array([region.offset], dtype=np.int64)
    for stride, count in dims:
        starts = (starts[:, None] + stride * np.arange(count, dtype=np.int64)).ravel()
    return starts, run
