"""Importing this, where there is no GPU, lets accelerate shard over CPUs: its and DeepSpeed's own code does the work.

accelerate never chooses FSDP2 without an accelerator, and transformers refuses bf16 with DeepSpeed there.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers.training_args
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType

_init = AcceleratorState.__init__


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


if not torch.cuda.is_available():
    AcceleratorState.__init__ = _choose_fsdp
    transformers.training_args.is_torch_bf16_gpu_available = lambda: True
