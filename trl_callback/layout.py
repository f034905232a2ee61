"""Where a checkpoint tensor's elements lie in the parameter that a trainer holds, and which of them one shard has."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedModel

from delta_sync.errors import MappingError
from trl_callback.serving_image import checkpoint_tensors

Shape = tuple[int, ...]


def row_major(shape: Sequence[int]) -> Shape:
    """The strides, in elements, of a contiguous tensor."""
    return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))


@dataclass(frozen=True)
class Region:
    """Elements of a checkpoint tensor, in their order: positions ``offset + sum(index * strides)`` over ``shape``."""

    offset: int
    strides: Shape
    shape: Shape

    @property
    def size(self) -> int:
        """How many elements it has."""
        return math.prod(self.shape)

    @property
    def is_run(self) -> bool:
        """Whether its positions follow each other without a hole."""
        return all(n == 1 or s == r for s, r, n in zip(self.strides, row_major(self.shape), self.shape, strict=True))

    def positions(self, index: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Positions, int64 ``[n]``, of this region's ``index``-th elements, int64 ``[n]``; rising if those rise."""
        if self.is_run:
            return index + self.offset
        axes = np.unravel_index(index, self.shape)
        return sum((a * s for a, s in zip(axes, self.strides, strict=True)), np.full(index.size, self.offset))


def whole(shape: Shape) -> Region:
    """All of a tensor."""
    return Region(0, row_major(shape), shape)


@dataclass(frozen=True)
class Source:
    """A checkpoint tensor as a view of a contiguous parameter in memory: ``offset`` and ``strides`` in elements."""

    name: str
    shape: Shape
    offset: int
    strides: Shape


@dataclass(frozen=True)
class Box:
    """The part of a parameter that a rank holds: from ``start``, ``size`` elements along each axis."""

    start: Shape
    size: Shape


@dataclass(frozen=True)
class Cut:
    """What a box holds of a source: ``local[slices].permute(order)``, in this order, is ``region`` of the source."""

    slices: tuple[slice, ...]
    order: Shape
    region: Region

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """The elements, a view of the rank's ``local`` tensor."""
        return local[self.slices].permute(self.order)


def sources(model: nn.Module, name: str, shape: Shape) -> list[Source]:
    """The checkpoint tensors that transformers makes of the parameter ``name``, found without its values.

    MappingError where one is not a plain view of the parameter, so that a shard could not be placed.
    """
    if not isinstance(model, PreTrainedModel):
        return [Source(name, shape, 0, row_major(shape))]
    probe = torch.empty(shape, device="meta")
    with _WithoutCopies():
        parts = checkpoint_tensors(model, name, probe)
    storage = probe.untyped_storage()._cdata
    if any(part.untyped_storage()._cdata != storage for part in parts.values()):
        raise _not_views(name, model)
    if sum(part.numel() for part in parts.values()) != probe.numel():
        raise _not_views(name, model)
    return [Source(n, tuple(part.shape), int(part.storage_offset()), part.stride()) for n, part in parts.items()]


class _WithoutCopies(TorchFunctionMode):
    """Conversions end in ``contiguous()``, which hides where elements came from: leave it, and its like, out."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.Tensor.contiguous, torch.Tensor.clone):
            return args[0]
        return func(*args, **(kwargs or {}))


def _not_views(name: str, model: nn.Module) -> MappingError:
    return MappingError(
        f"parameter {name!r}, a shard on each rank",
        expected="a checkpoint layout that is a view of it",
        got=f"a conversion of {type(model).__name__} that moves elements about",
        remedy="train with DDP or ZeRO stage <= 2, where every rank holds it whole",
    )


def cut(source: Source, shape: Shape, box: Box) -> Cut | None:
    """What ``box`` of a parameter of ``shape`` holds of ``source``; None if nothing. MappingError if it can't say."""
    axis_of, base = _axes(source, shape)
    extent = [1] * len(shape)
    for axis, n in zip(axis_of, source.shape, strict=True):
        if axis is not None:
            extent[axis] = n
    low = [max(b, s) for b, s in zip(base, box.start, strict=True)]
    high = [min(b + n, s + k) for b, n, s, k in zip(base, extent, box.start, box.size, strict=True)]
    if any(h <= lo for lo, h in zip(low, high, strict=True)) or 0 in source.shape:
        return None
    strides = row_major(source.shape)
    moved = [0 if axis is None else low[axis] - base[axis] for axis in axis_of]
    sizes = tuple(1 if axis is None else high[axis] - low[axis] for axis in axis_of)
    region = Region(sum(m * s for m, s in zip(moved, strides, strict=True)), strides, sizes)
    slices = tuple(slice(lo - s, h - s) for lo, h, s in zip(low, high, box.start, strict=True))
    used = [axis for axis in axis_of if axis is not None]
    return Cut(slices, (*(axis for axis in range(len(shape)) if axis not in used), *used), region)


def _axes(source: Source, shape: Shape) -> tuple[list[int | None], list[int]]:
    """The parameter's axis that each axis of the source runs along (None: of size 1), and where the source begins."""
    strides = row_major(shape)
    base, left = [], source.offset
    for stride in strides:
        base.append(left // stride)
        left %= stride
    axis_of: list[int | None] = []
    for stride, n in zip(source.strides, source.shape, strict=True):
        fits = [a for a, s in enumerate(strides) if s == stride and base[a] + n <= shape[a]]
        if n != 1 and not fits:
            raise MappingError(
                f"tensor {source.name!r} {list(source.shape)}",
                expected=f"axes that are axes of the parameter {list(shape)}, which is held in shards",
                got=f"strides {list(source.strides)}",
                remedy="train with DDP or ZeRO stage <= 2",
            )
        axis_of.append(None if n == 1 else fits[-1])
    return axis_of, base


def flattened(source: Source) -> Source:
    """The source along the parameter's one flat axis, for shards that are runs of it; MappingError if it is no run."""
    if not Region(source.offset, source.strides, source.shape).is_run:
        raise MappingError(
            f"tensor {source.name!r}, in flat shards",
            expected="elements that lie one after the other in the parameter",
            got=f"strides {list(source.strides)} for shape {list(source.shape)}",
            remedy="train with FSDP2, DDP or ZeRO stage <= 2",
        )
    return Source(source.name, (math.prod(source.shape),), source.offset, (1,))
