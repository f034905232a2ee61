"""Seam: vLLM's LoRA manager in a worker, one adapter of which always is the run's newest (vLLM 0.27 to 0.32).

That adapter keeps its id, its name and its place on the device from start to end: a version is other numbers in that
place. So requests that run go on, nothing has to be unloaded, and one slot of ``--max-loras`` is enough.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from vllm_delta_plugin.compat.seam import require

ID = 2**31 - 1  # vLLM counts those of --lora-modules from 1
NAME = "delta-sync"


def adapter_request() -> Any:
    """What a request must carry to be answered with the run's adapter."""
    from vllm.lora.request import LoRARequest

    return LoRARequest(lora_name=NAME, lora_int_id=ID, lora_path=NAME)


class LoraManager:
    """The few things the plugin does to it; made once it is up, with nothing loaded: an adapter that adds nothing."""

    def __init__(self, model_runner: Any) -> None:
        require(model_runner, "lora_manager")
        worker = model_runner.lora_manager
        require(worker, "_adapter_manager", "lora_config", "vocab_size")
        manager = worker._adapter_manager
        require(manager, "modules", "packed_modules", "lora_index_to_id", "activate_adapter", "pin_adapter", "model")
        require(manager, "_create_merged_loras_inplace", "_get_lora_layer_weights", "_registered_adapters")
        self._vocab, self._manager = worker.vocab_size, manager
        self.max_rank, self.dtype = int(worker.lora_config.max_lora_rank), worker.lora_config.lora_dtype
        self.loaded = self.nothing()
        manager._registered_adapters[ID] = self.loaded
        manager.activate_adapter(ID)
        manager.pin_adapter(ID)

    @property
    def modules(self) -> set[str]:
        """The modules of the checkpoint that can have an adapter here, by their full names in vLLM's model."""
        packed = self._manager.packed_modules
        return {part for name in self._manager.modules for part in packed.get(name, (name,))}

    def nothing(self) -> Any:
        """An adapter that adds nothing."""
        from vllm.lora.lora_model import LoRAModel

        return LoRAModel(ID, 1, {})

    def prepare(self, config: Mapping[str, object], tensors: Mapping[str, torch.Tensor]) -> Any:
        """vLLM's own form of an adapter, in host memory; ``tensors`` by PEFT's names, changed while B is scaled."""
        from vllm.lora.lora_model import LoRAModel
        from vllm.lora.peft_helper import PEFTHelper

        adapter = LoRAModel.from_lora_tensors(
            ID,
            dict(tensors),
            PEFTHelper.from_dict(dict(config)),
            device="cpu",
            dtype=self.dtype,
            model_vocab_size=self._vocab,
            weights_mapper=self._mapper(),
            skip_prefixes=getattr(self._manager.model, "lora_skip_prefixes", None),
        )
        self._manager._create_merged_loras_inplace(adapter)
        return adapter

    def module_of(self, name: str) -> str:
        """What vLLM calls the module of an adapter's tensor."""
        from vllm.lora.utils import parse_fine_tuned_lora_name

        found, _ = parse_fine_tuned_lora_name(name, self._mapper())
        return str(found)

    def load(self, adapter: Any) -> None:
        """Write an adapter where the one before was, on the worker's stream."""
        manager, slot = self._manager, self._slot
        for name, module in manager.modules.items():
            weights = manager._get_lora_layer_weights(adapter, name)
            if weights:
                module.set_lora(slot, weights.lora_a, weights.lora_b)
            else:
                module.reset_lora(slot)
        manager._registered_adapters[ID] = adapter
        self.loaded = adapter

    def resident(self, name: str, part: str, rank: int) -> torch.Tensor:
        """A copy of A or B (``part``) of a module as this worker computes with it, B scaled; KeyError for no module."""
        for wrapper, module in self._manager.modules.items():
            parts = self._manager.packed_modules.get(wrapper, [wrapper])
            if name in parts:
                stacked = module.lora_a_stacked if part == "A" else module.lora_b_stacked
                held = stacked[parts.index(name)] if isinstance(stacked, tuple) else stacked
                live: torch.Tensor = held[self._slot, 0, :rank] if part == "A" else held[self._slot, 0, :, :rank]
                return live.cpu().clone()
        raise KeyError(name)

    @property
    def _slot(self) -> int:
        return int(self._manager.lora_index_to_id.index(ID))

    def _mapper(self) -> Any:
        """Renames from checkpoint to vLLM, without the fusing of modules, which the manager does itself."""
        mapper = getattr(self._manager.model, "hf_to_vllm_mapper", None)
        for name in ("get_rename_mapper", "get_unstacked_mapper"):  # since 0.28; up to it
            if hasattr(mapper, name):
                return getattr(mapper, name)()
        return mapper
