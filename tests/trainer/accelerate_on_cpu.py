"""Importing this, where there is no GPU, lets accelerate shard over CPUs: its and DeepSpeed's own code does the work.

accelerate never chooses FSDP2 without an accelerator, and transformers refuses bf16 with DeepSpeed there. And
accelerate (1.15) lets DeepSpeed start its ranks there but then finds "no backend" and takes each of them for the only
process, index 0 of 1. What ranks do by their index goes wrong: in GRPO all take themselves for the main process.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers.training_args
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__
_prepare_backend = PartialState._prepare_backend


def _choose_fsdp(self: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
    _init(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if self.distributed_type != DistributedType.MULTI_CPU:
        return
    if fsdp_plugin is not None:
        if self._mixed_precision != "no":
            fsdp_plugin.set_mixed_precision(self._mixed_precision)
        self.fsdp_plugin = fsdp_plugin
    if self.__dict__.get("fsdp_plugin") is not None:
        self.distributed_type = DistributedType.FSDP


def _gloo_for_deepspeed(self: Any, *args: Any, **kwargs: Any) -> tuple[str | None, DistributedType]:
    """accelerate's own choice for CPUs, which it makes only where it is told to use them, and then not DeepSpeed."""
    backend, kind = _prepare_backend(self, *args, **kwargs)
    if backend is None and "RANK" in os.environ and os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        return "gloo", DistributedType.MULTI_CPU
    return backend, kind


def _build_nothing() -> None:
    """DeepSpeed compiles a kernel for its all-reduce at start; a build that was interrupted has all later runs wait."""
    if os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true":
        import deepspeed.comm.torch

        deepspeed.comm.torch.build_shm_op = lambda: None


if not torch.cuda.is_available():
    _build_nothing()
    PartialState._prepare_backend = _gloo_for_deepspeed
    AcceleratorState.__init__ = _choose_fsdp
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
