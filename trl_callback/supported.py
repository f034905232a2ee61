"""Which models can be published exactly, and what to do about those that can't."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from delta_sync.errors import MappingError
from trl_callback.adapters import Adapters, base_of

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unwrap(model: nn.Module) -> nn.Module:
    """The module under DDP, DataParallel, torch.compile and ``PeftModel``."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        elif (base := base_of(model)) is not model:
            model = base
        else:
            return model


def check_model(model: nn.Module, *, shards_allowed: bool = False) -> None:
    """MappingError, naming the model or tensor and the remedy, unless its weights are plain floats in memory.

    shards_allowed: they may be shards of FSDP2 or DeepSpeed ZeRO-3, to be published by all ranks together.
    """
    kind = type(model).__name__
    if (getattr(model, "_tp_size", None) or 1) > 1:
        _refuse(f"model {kind}", "weights that are whole, or FSDP2's or ZeRO-3's shards", "tensor parallelism",
                "train with FSDP2, DDP or DeepSpeed")  # fmt: skip
    check_adapters(model, Adapters(model))
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            _refuse(f"module {name or kind!r}", "shards of single tensors", "FSDP1's flattened parameters",
                    "train with FSDP2 (fsdp_version: 2)")  # fmt: skip
    for name, tensor in [*model.named_parameters(), *_float_state(model)]:
        _check_tensor(name, tensor, shards_allowed)


def check_adapters(model: nn.Module, adapters: Adapters) -> None:
    """MappingError where the model has adapters over shards: no rank can merge them alone."""
    if adapters and has_shards(model):
        _refuse(f"model {type(model).__name__} with adapters", "weights that each rank holds whole",
                "shards (FSDP2 or ZeRO-3)", "train with DDP or ZeRO stage <= 2")  # fmt: skip


def _check_tensor(name: str, tensor: torch.Tensor, shards_allowed: bool) -> None:
    what = f"tensor {name!r}"
    if is_shard(tensor) and not shards_allowed:
        _refuse(what, "whole weights", "a shard (FSDP2 or ZeRO-3)", "train under torchrun or accelerate launch")
    if "tp" in (mesh_axes(tensor) or ()):
        _refuse(what, "FSDP2's shards", "a tensor-parallel shard", "train with FSDP2, DDP or DeepSpeed")
    if tensor.is_meta:
        _refuse(what, "weights in memory", "the meta device", "load the model without disk offload")
    if tensor.dtype not in FLOATS or hasattr(tensor, "quant_state"):
        _refuse(what, f"one of {[str(d).removeprefix('torch.') for d in FLOATS]}",
                str(tensor.dtype).removeprefix("torch."), "train unquantised weights")  # fmt: skip


def is_shard(tensor: torch.Tensor) -> bool:
    """Whether this process may hold only a part of the tensor: FSDP2's, or DeepSpeed ZeRO-3's."""
    return isinstance(tensor, DTensor) or hasattr(tensor, "ds_tensor")


def has_shards(model: nn.Module) -> bool:
    """Whether any weight is a shard."""
    return any(is_shard(parameter) for parameter in model.parameters())


def mesh_axes(tensor: torch.Tensor) -> tuple[str, ...] | None:
    """The names of a DTensor's mesh axes, None if it has none."""
    return tensor.device_mesh.mesh_dim_names if isinstance(tensor, DTensor) else None


def _float_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _refuse(what: str, expected: str, got: str, remedy: str) -> None:
    raise MappingError(what, expected=expected, got=got, remedy=remedy)
