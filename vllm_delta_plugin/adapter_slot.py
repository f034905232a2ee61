"""A version's LoRA adapter on one rank: read, proven and made ready beside the live one, then exchanged for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from delta_sync.adapter import PREFIX, Adapter, read_adapter
from delta_sync.anchor_files import Tensor
from delta_sync.errors import MappingError
from vllm_delta_plugin.commit import Swap
from vllm_delta_plugin.compat.lora_seam import LoraManager
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_storage import element_type

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.manifest import Manifest

_TORCH = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


class AdapterSlot:
    """The place of the run's adapter in vLLM's LoRA manager; empty, it adds nothing to the base weights."""

    def __init__(self, manager: LoraManager, weights: WeightMap) -> None:
        self._manager, self._weights = manager, weights

    def describe(self) -> dict[str, Any]:
        """What an adapter must be like, as the status shows it: largest rank, element type, names of modules."""
        kind = element_type(self._manager.dtype)
        names = sorted({name.rpartition(".")[2] for name in self._manager.modules})
        return {"max_rank": self._manager.max_rank, "dtype": kind.name if kind else None, "modules": names}

    def prepare(self, ledger: Ledger, manifest: Manifest) -> Any:
        """The adapter of a version, proven; MappingError if this server cannot have it, else as ``read_adapter``."""
        adapter = read_adapter(ledger, manifest)
        self._check(adapter, f"adapter of version {manifest.version}")
        tensors = {name: _tensor(tensor) for name, tensor in adapter.tensors.items()}
        return self._manager.prepare(adapter.config.to_peft(), tensors)

    def exchange(self, adapter: Any) -> Any:
        """Load an adapter; the one before it. On an exception that one is loaded as before."""
        before = self._manager.loaded
        try:
            self._manager.load(adapter)
        except BaseException:
            self._manager.load(before)
            raise
        return before

    def nothing(self) -> Any:
        """What to load where a version has no adapter."""
        return self._manager.nothing()

    def read(self, name: str, part: str, rank: int) -> bytes:
        """Bytes of one module's A or B as this rank computes with it."""
        live = self._manager.resident(self._manager.module_of(f"{PREFIX}{name}.lora_{part}.weight"), part, rank)
        return live.contiguous().view(torch.uint8).numpy().tobytes()

    def _check(self, adapter: Adapter, what: str) -> None:
        expected = self.describe()
        if adapter.config.r > expected["max_rank"]:
            raise MappingError(what, expected=f"a rank of at most {expected['max_rank']}", got=adapter.config.r,
                               remedy="serve with a larger --max-lora-rank")  # fmt: skip
        known = self._manager.modules
        for module, pair in adapter.modules.items():
            name = self._manager.module_of(pair[0][0])
            if name not in known and name.rpartition(".")[2] not in expected["modules"]:
                raise MappingError(f"module {module!r} in {what}", expected=f"one of {expected['modules']}",
                                   got="one that this server cannot adapt",
                                   remedy="leave it out of target_modules, or publish merged weights")  # fmt: skip
            self._check_pair(module, *pair, dtype=expected["dtype"], what=what)

    def _check_pair(self, module: str, a: Tensor, b: Tensor, dtype: str | None, what: str) -> None:
        if a[1].name != dtype:
            raise MappingError(f"element type of {what}", expected=dtype, got=a[1].name,
                               remedy="set serving_dtype in the trainer, or --lora-dtype here")  # fmt: skip
        base = self._weights.tensors.get(f"{module}.weight")
        found = (b[2][0], a[2][1])
        wanted = None if base is None else base.shape if "lora_A" in a[0] else base.shape[::-1]
        if wanted is not None and wanted != found:
            raise MappingError(f"module {module!r} in {what}", expected=f"outputs and inputs {[*wanted]}",
                               got=[*found], remedy="serve the model that is trained")  # fmt: skip


@dataclass
class AdapterSwap:
    """Staged weights, and the adapter over them: both change places with what is live, or neither does."""

    weights: Swap
    slot: AdapterSlot
    adapter: Any

    def swap(self, between: Callable[[], None]) -> None:
        """See Swap."""
        self.weights.swap(between)
        try:
            self.adapter = self.slot.exchange(self.adapter)
        except BaseException:
            self.weights.swap(lambda: None)
            raise


def no_lora(manifest: Manifest) -> MappingError:
    """A version that is an adapter, at a server without LoRA."""
    return MappingError(
        f"version {manifest.version}",
        expected="weights: this server serves no LoRA adapters",
        got="a LoRA adapter",
        remedy='serve with --enable-lora and --max-lora-rank, or train with lora="merged"',
    )


def _tensor(tensor: Tensor) -> torch.Tensor:
    _, kind, shape, bits = tensor
    signed = bits.copy().view(np.dtype(f"<i{kind.itemsize}"))
    return torch.from_numpy(signed).view(_TORCH[kind.name]).reshape(shape)
