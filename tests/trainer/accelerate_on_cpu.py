"""Importing this lets accelerate shard with FSDP2 on CPUs: its own code does all the work, it only never chooses to."""

from __future__ import annotations

from typing import Any

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


AcceleratorState.__init__ = _choose_fsdp
