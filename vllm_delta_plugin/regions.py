"""Which elements of a checkpoint tensor live where: affine boxes, their identity, and the index map they define."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.context_model import Tile
from delta_sync.errors import MappingError
from delta_sync.jit import compiled

Ints = tuple[int, ...]


@dataclass(frozen=True)
class Region:
    """One affine piece of a checkpoint tensor and the live storage it was loaded into.

    Element ``i`` of the box ``shape`` is checkpoint position ``src_offset + i . src_strides`` (row-major flat index)
    and live element ``dst_offset + i . dst_strides`` of storage ``storage``. Offsets and strides are in elements.
    Dimensions are ordered by falling source stride; each stride exceeds the extent of the dimensions inside it.
    """

    tensor: str
    storage: int
    shape: Ints
    src_offset: int
    src_strides: Ints
    dst_offset: int
    dst_strides: Ints

    @cached_property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @cached_property
    def key(self) -> str:
        """Identity of the *source* elements: equal on two ranks exactly when they hold copies of the same elements."""
        dims = _merge([(n, s, 0) for n, s in zip(self.shape, self.src_strides, strict=True)], source_only=True)
        shape, strides = tuple(n for n, _, _ in dims), tuple(s for _, s, _ in dims)
        return f"{self.tensor}|{self.src_offset}|{strides}|{shape}"

    @property
    def src_last(self) -> int:
        """The largest checkpoint position in the region."""
        return self.src_offset + sum((n - 1) * s for n, s in zip(self.shape, self.src_strides, strict=True))

    @property
    def dst_last(self) -> int:
        """The largest live element in the region."""
        return self.dst_offset + sum((n - 1) * s for n, s in zip(self.shape, self.dst_strides, strict=True))

    def arrays(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """``(shape, src_strides, dst_strides)`` as int64 arrays, for compiled kernels."""
        return tuple(np.array(v, dtype=np.int64) for v in (self.shape, self.src_strides, self.dst_strides))  # type: ignore[return-value]


def make_region(
    tensor: str, storage: int, shape: Ints, src_offset: int, src_strides: Ints, dst_offset: int, dst_strides: Ints
) -> Region:
    """Build a region in normal form; MappingError if the source repeats elements or interleaves irregularly."""
    dims = [(n, s, d) for n, s, d in zip(shape, src_strides, dst_strides, strict=True) if n != 1]
    dims = _merge(sorted(dims, key=lambda dim: -dim[1]), source_only=False)
    extent = 0
    for n, s, _ in reversed(dims):
        if s <= extent:
            raise MappingError(
                f"tensor {tensor!r}",
                expected="a load that reads each checkpoint element once, along nested strides",
                got=f"shape {shape} read with strides {src_strides}",
                remedy="this architecture's loader is not supported; please report it",
            )
        extent += (n - 1) * s
    return Region(
        tensor,
        storage,
        tuple(n for n, _, _ in dims),
        src_offset,
        tuple(s for _, s, _ in dims),
        dst_offset,
        tuple(d for _, _, d in dims),
    )


def _merge(dims: Sequence[tuple[int, int, int]], *, source_only: bool) -> list[tuple[int, int, int]]:
    """Join neighbouring (size, src stride, dst stride) dimensions that one longer dimension describes as well."""
    out: list[tuple[int, int, int]] = []
    for n, s, d in dims:
        if out and out[-1][1] == n * s and (source_only or out[-1][2] == n * d):
            out[-1] = (out[-1][0] * n, s, d)
        else:
            out.append((n, s, d))
    return out


def split(region: Region, max_elements: int) -> Iterator[Region]:
    """Cut a region into pieces of at most ``max_elements`` along its outermost dimensions."""
    if region.numel <= max_elements or not region.shape:
        yield region
        return
    n, s, d = region.shape[0], region.src_strides[0], region.dst_strides[0]
    rows = max(1, max_elements // (region.numel // n))
    for start in range(0, n, rows):
        count = min(rows, n - start)
        piece = replace(region, src_offset=region.src_offset + start * s, dst_offset=region.dst_offset + start * d)
        if count > 1 or n == 1:
            yield replace(piece, shape=(count, *region.shape[1:]))
        else:
            inner = replace(
                piece, shape=region.shape[1:], src_strides=region.src_strides[1:], dst_strides=region.dst_strides[1:]
            )
            yield from split(inner, max_elements)


@compiled
def _map_positions(
    positions: Any,
    src_offset: Any,
    src_strides: Any,
    dst_offset: Any,
    dst_strides: Any,
    shape: Any,
    which: Any,
    dst: Any,
) -> Any:
    count = 0
    for k in range(positions.size):
        rest = positions[k] - src_offset
        at = dst_offset
        inside = rest >= 0
        for dim in range(shape.size):
            i = rest // src_strides[dim]
            if i >= shape[dim]:
                inside = False
                break
            rest -= i * src_strides[dim]
            at += i * dst_strides[dim]
        if inside and rest == 0:
            which[count] = k
            dst[count] = at
            count += 1
    return count


def map_positions(
    region: Region, positions: npt.NDArray[np.int64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Find which of the increasing flat ``positions`` (int64 ``[n]``) lie in the region, and where they live.

    Returns ``(which, dst)``, int64 ``[m]``: ``positions[which]`` are inside, at live elements ``dst``.
    """
    lo = int(np.searchsorted(positions, region.src_offset, side="left"))
    hi = int(np.searchsorted(positions, region.src_last, side="right"))
    which, dst = np.empty(hi - lo, np.int64), np.empty(hi - lo, np.int64)
    shape, src_strides, dst_strides = region.arrays()
    count = _map_positions(
        positions[lo:hi], region.src_offset, src_strides, region.dst_offset, dst_strides, shape, which, dst
    )
    return which[:count] + lo, dst[:count]


@compiled
def _mark(seen: Any, offset: Any, strides: Any, shape: Any) -> Any:
    total = 1
    for n in shape:
        total *= n
    for k in range(total):
        rest, at = k, offset
        for dim in range(shape.size - 1, -1, -1):
            at += (rest % shape[dim]) * strides[dim]
            rest //= shape[dim]
        if seen[at]:
            return True
        seen[at] = True
    return False


def overlapping(boxes: Iterable[tuple[int, Ints, Ints]]) -> bool:
    """Whether any element belongs to two of the affine boxes ``(offset, strides, shape)`` of one flat array.

    Boxes whose spans are apart cost nothing; otherwise one byte per element of the shared span is used.
    """
    spans = sorted((o, o + sum((n - 1) * s for n, s in zip(sh, st, strict=True)), st, sh) for o, st, sh in boxes)
    cluster: list[tuple[int, int, Ints, Ints]] = []
    end = -1
    for span in spans:
        if span[0] > end:
            if _cluster_overlaps(cluster):
                return True
            cluster = []
        cluster.append(span)
        end = max(end, span[1])
    return _cluster_overlaps(cluster)


def _cluster_overlaps(cluster: Sequence[tuple[int, int, Ints, Ints]]) -> bool:
    if len(cluster) < 2:
        return False
    low = cluster[0][0]
    seen = np.zeros(max(last for _, last, _, _ in cluster) - low + 1, dtype=np.bool_)
    return any(
        _mark(seen, first - low, np.array(strides, np.int64), np.array(shape, np.int64))
        for first, _, strides, shape in cluster
    )


def by_tensor(regions: Iterable[Region]) -> dict[str, list[Region]]:
    """Group regions by checkpoint tensor."""
    out: dict[str, list[Region]] = {}
    for region in regions:
        out.setdefault(region.tensor, []).append(region)
    return out


def locate(region: Region, elements: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Positions and live elements, int64 ``[n]`` each, of the region's ``elements`` (row-major indices of its box)."""
    positions, dst = np.full_like(elements, region.src_offset), np.full_like(elements, region.dst_offset)
    if region.shape:
        axes = zip(np.unravel_index(elements, region.shape), region.src_strides, region.dst_strides, strict=True)
        for index, src_stride, dst_stride in axes:
            positions += index * src_stride
            dst += index * dst_stride
    return positions, dst


def holds(region: Region, columns: int, tile: Tile) -> bool:
    """Whether a region has all of a tile of a tensor seen as a matrix of ``columns``."""
    if region.src_last - region.src_offset == region.numel - 1:  # a run, as of whole rows
        last = tile.start + (tile.rows - 1) * tile.stride + tile.length
        return region.src_offset <= tile.start and last <= region.src_last + 1
    if len(region.shape) != 2 or region.src_strides != (columns, 1):
        return False
    top, left = divmod(region.src_offset, columns)
    row, column = divmod(tile.start, columns)
    rows, width = (tile.length // columns, columns) if tile.rows == 1 and not tile.stride else (tile.rows, tile.length)
    inside = top <= row and row + rows <= top + region.shape[0]
    return inside and left <= column and column + width <= left + region.shape[1]


def scatter_source(flat: npt.NDArray[Any], region: Region, values: npt.NDArray[Any]) -> None:
    """The inverse of gather_source: write the region's elements ``[numel]`` into a whole tensor's flat bits."""
    strides = tuple(s * flat.itemsize for s in region.src_strides)
    view = np.lib.stride_tricks.as_strided(flat[region.src_offset :], region.shape, strides)
    view[...] = values.reshape(region.shape)


def gather_source(flat: npt.NDArray[Any], region: Region) -> npt.NDArray[Any]:
    """The region's elements of a whole checkpoint tensor's flat bits, contiguous ``[numel]``."""
    strides = tuple(s * flat.itemsize for s in region.src_strides)
    view = np.lib.stride_tricks.as_strided(flat[region.src_offset :], region.shape, strides, writeable=False)
    return view.reshape(-1)
