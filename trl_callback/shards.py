"""What one rank holds of a model, however a trainer laid it over its ranks: each element on exactly one of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from delta_sync.errors import MappingError
from trl_callback.layout import Box, Shape
from trl_callback.serving_image import stored_buffers, stored_parameters
from trl_callback.supported import is_shard


@dataclass(frozen=True)
class Held:
    """A rank's share of one stored tensor: ``local`` is ``box`` of a tensor of ``shape``.

    flat: shape and box are along one axis, that of the tensor's elements in row-major order; ``full`` is its shape.
    """

    name: str
    local: torch.Tensor
    shape: Shape
    box: Box
    full: Shape

    @property
    def flat(self) -> bool:
        """Whether this is a run of elements rather than a block along the tensor's own axes."""
        return self.shape != self.full

    @property
    def is_whole(self) -> bool:
        """Whether no other rank holds anything of it."""
        return self.box.size == self.shape


def held(model: nn.Module, rank: int, ranks: int) -> Iterator[Held]:
    """This rank's share of every stored tensor.

    Where ranks hold all weights (DDP, ZeRO-1 and 2) the parameters are dealt out, so that comparing, snapshot and
    encoding are shared. Beside sharded ones, whole parameters and buffers are rank 0's: FSDP leaves the ranks' copies
    of what it ignores to drift apart. Raises MappingError for a layout that is not understood.
    """
    reshard(model)
    parameters = list(stored_parameters(model))
    sharded = any(is_shard(parameter) for _, parameter in parameters)
    owner = {} if sharded else _dealt({name: parameter.numel() for name, parameter in parameters}, ranks)
    for name, parameter in parameters:
        if is_shard(parameter):
            share = _of_dtensor(name, parameter) if isinstance(parameter, DTensor) else _of_zero(name, parameter)
            if share is not None:
                yield share
        elif owner.get(name, 0) == rank:
            yield _whole(name, parameter)
    if rank == 0:
        yield from (_whole(name, buffer) for name, buffer in stored_buffers(model))


def reshard(model: nn.Module) -> None:
    """Have FSDP2 modules show their shards, which the optimizer steps: after an evaluation some show gathered copies.

    Local, not a collective; a gathered copy is only freed.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def _dealt(sizes: dict[str, int], ranks: int) -> dict[str, int]:
    """Name -> rank, largest first to the rank that has least: the same on every rank."""
    load = [0] * ranks
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return owner


def _whole(name: str, tensor: torch.Tensor) -> Held:
    shape = tuple(tensor.shape)
    return Held(name, tensor.detach(), shape, Box((0,) * len(shape), shape), shape)


def _of_dtensor(name: str, tensor: DTensor) -> Held | None:
    mesh, placements = tensor.device_mesh, tensor.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise MappingError(f"tensor {name!r}", expected="shards or copies along each axis of its device mesh",
                           got=str(placements), remedy="train with FSDP2 without tensor parallelism")  # fmt: skip
    at = mesh.get_coordinate()
    if at is None or any(isinstance(p, Replicate) and at[axis] for axis, p in enumerate(placements)):
        return None  # another rank's, or a copy of another's
    local = cast(DTensor, tensor.detach()).to_local()
    size, start = compute_local_shape_and_global_offset(tensor.shape, mesh, placements)
    if tuple(local.shape) != tuple(size):
        raise MappingError(f"shard of {name!r}", expected=f"shape {list(size)}", got=list(local.shape))
    shape = tuple(tensor.shape)
    return Held(name, local, shape, Box(tuple(start), tuple(size)), shape)


def _of_zero(name: str, parameter: Any) -> Held | None:
    """DeepSpeed's shards are runs of equal length of a tensor's elements; the last ones are padded."""
    part, total = parameter.ds_tensor, int(parameter.ds_numel)
    if getattr(part, "status", None) is not None and part.status.name != "AVAILABLE":
        raise MappingError(f"shard of {name!r}", expected="values in memory", got=f"{part.status.name} (NVMe offload)",
                           remedy="offload parameters to the CPU at most")  # fmt: skip
    rank = torch.distributed.get_rank(group=parameter.ds_process_group)
    start = min(rank * part.numel(), total)
    size = min(part.numel(), total - start)
    if size == 0:
        return None
    full = tuple(parameter.ds_shape)
    local = part.detach().reshape(-1)[:size]
    return Held(name, local, (math.prod(full),), Box((start,), (size,)), full)
