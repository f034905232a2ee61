"""Which models can be published exactly, and what to do about those that can't."""

from __future__ import annotations

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DataParallel, DistributedDataParallel

from delta_sync.errors import MappingError

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def unwrap(model: nn.Module) -> nn.Module:
    """The module under DDP, DataParallel and torch.compile."""
    while True:
        if isinstance(model, DistributedDataParallel | DataParallel):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = model._orig_mod  # type: ignore[assignment]
        else:
            return model


def check_model(model: nn.Module) -> None:
    """MappingError, naming the model or tensor and the remedy, unless every rank holds every weight plainly."""
    kind = type(model).__name__
    if hasattr(model, "merge_adapter") or getattr(model, "_hf_peft_config_loaded", False):
        _refuse(
            f"PEFT model {kind}", "a full-parameter model", "adapters", "train without an adapter, or merge it first"
        )
    for name, module in model.named_modules():
        if isinstance(module, FullyShardedDataParallel):
            _refuse(f"module {name or kind!r}", "whole weights on every rank", "FSDP shards", "train with DDP")
    for name, tensor in [*model.named_parameters(), *_float_state(model)]:
        _check_tensor(name, tensor)


def _check_tensor(name: str, tensor: torch.Tensor) -> None:
    what = f"tensor {name!r}"
    if hasattr(tensor, "ds_id") or hasattr(tensor, "ds_tensor"):
        _refuse(what, "whole weights on every rank", "a DeepSpeed ZeRO-3 shard", "train with DDP or ZeRO stage <= 2")
    if hasattr(tensor, "placements"):
        _refuse(what, "whole weights on every rank", "a DTensor shard (FSDP2 or tensor parallel)", "train with DDP")
    if tensor.is_meta:
        _refuse(what, "weights in memory", "the meta device", "load the model without disk offload")
    if tensor.dtype not in FLOATS or hasattr(tensor, "quant_state"):
        _refuse(what, f"one of {[str(d).removeprefix('torch.') for d in FLOATS]}",
                str(tensor.dtype).removeprefix("torch."), "train unquantised weights")  # fmt: skip


def _float_state(model: nn.Module) -> list[tuple[str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, buffer)
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    ]


def _refuse(what: str, expected: str, got: str, remedy: str) -> None:
    raise MappingError(what, expected=expected, got=got, remedy=remedy)
