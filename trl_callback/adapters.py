"""PEFT adapters: what a model's weights are with them merged, computed beside the weights and never into them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from delta_sync.errors import MappingError

_MERGEABLE = ("Linear", "Embedding", "Conv1d", "Conv2d", "Conv3d")
_REMEDY = "merge the adapter and train full weights, or use LoRA or DoRA on linear, embedding and convolution layers"


class Adapters:
    """The adapted layers of ``model`` (below ``PeftModel``, or with ``add_adapter``'s), found anew at each look.

    MappingError, naming the module, for an adapter whose merge can't be computed beside the weights.
    """

    def __init__(self, model: nn.Module) -> None:
        self._layers = {name: module for name, module in model.named_modules() if _is_tuner(module)}
        self._copies = {name: module for name, module in model.named_modules() if _is_copy(module)}
        for name, layer in self._layers.items():
            _check(name, layer)
        if self:
            self._refuse_tied(model)

    @property
    def layers(self) -> Mapping[str, Any]:
        """PEFT's layers, by the names of the modules that they adapt."""
        return self._layers

    @property
    def copied(self) -> list[str]:
        """Modules that are trained whole beside a frozen copy (``modules_to_save``)."""
        return list(self._copies)

    def __bool__(self) -> bool:
        return bool(self._layers or self._copies)

    def _refuse_tied(self, model: nn.Module) -> None:
        """One weight under two names can't be merged under one of them alone."""
        names: dict[int, str] = {}
        adapted = {id(layer.base_layer.weight): name for name, layer in self._layers.items()}
        for name, copy in self._copies.items():
            adapted |= {id(parameter): name for parameter in copy.original_module.parameters()}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            other = names.setdefault(id(parameter), name)
            if other != name and id(parameter) in adapted:
                raise MappingError(f"adapter of module {adapted[id(parameter)]!r}", expected="a weight of its own",
                                   got=f"one that is tied: {other} and {name}",
                                   remedy="leave tied embeddings out of target_modules and modules_to_save, or untie "
                                   "them")  # fmt: skip

    def plain_name(self, name: str) -> str | None:
        """The name that the model without adapters has for this parameter or buffer; None if that has none."""
        for owner, rest in _owners(name):
            if owner in self._layers:
                inner = rest.removeprefix("base_layer.")
                return None if inner == rest else f"{owner}.{inner}"
            if owner in self._copies:
                active = f"modules_to_save.{_active(owner, self._copies[owner])}."
                inner = rest.removeprefix(active)
                return None if inner == rest else f"{owner}.{inner}"
        return name

    def merged(self, plain_name: str, weight: torch.Tensor) -> torch.Tensor:
        """``weight`` with every active adapter of its layer added: the bits of PEFT's ``merge_and_unload()``.

        A new tensor where there is an adapter; ``weight`` itself, and its layer, are left as they are.
        """
        owner, _, kind = plain_name.rpartition(".")
        layer = self._layers.get(owner)
        if layer is None or kind != "weight":
            return weight
        if layer.merged_adapters:
            raise MappingError(f"module {owner!r}", expected="adapters beside the weights",
                               got=f"{layer.merged_adapters} merged into them",
                               remedy="call unmerge_adapter() after looking at merged weights")  # fmt: skip
        out = nn.Parameter(weight.detach().clone(), requires_grad=False)
        with torch.no_grad():
            for adapter in layer.active_adapters:
                if adapter in layer.lora_variant:
                    layer.lora_variant[adapter].merge_unsafe(layer, adapter, out)
                elif adapter in layer.lora_A or adapter in layer.lora_embedding_A:
                    out.data += layer.get_delta_weight(adapter)
        return out.data


def base_of(model: nn.Module) -> nn.Module:
    """The model under a ``PeftModel``; any other model itself. MappingError if it has trained prompts."""
    if not (hasattr(model, "get_base_model") and hasattr(model, "peft_config")):
        return model
    for name, config in model.peft_config.items():  # type: ignore[union-attr,operator]
        if config.is_prompt_learning:
            raise MappingError(f"adapter {name!r}", expected="LoRA or DoRA", got=str(config.peft_type), remedy=_REMEDY)
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base


def _is_tuner(module: nn.Module) -> bool:
    return hasattr(module, "base_layer") and hasattr(module, "active_adapters")


def _is_copy(module: nn.Module) -> bool:
    return hasattr(module, "original_module") and hasattr(module, "modules_to_save")


def _owners(name: str) -> list[tuple[str, str]]:
    """Every module that a parameter lies in, outermost first, and its name there."""
    parts = name.split(".")
    return [(".".join(parts[:at]), ".".join(parts[at:])) for at in range(1, len(parts))]


def _active(name: str, module: Any) -> str:
    if len(module.active_adapters) != 1:
        raise MappingError(f"module {name!r}", expected="one active adapter", got=list(module.active_adapters))
    return str(module.active_adapters[0])


def _check(name: str, layer: Any) -> None:
    kind = type(layer)
    from_lora = kind.__module__ == "peft.tuners.lora.layer"
    biased = [adapter for adapter, has_bias in getattr(layer, "lora_bias", {}).items() if has_bias]
    if not from_lora or kind.__name__ not in _MERGEABLE or biased:
        got = f"{kind.__module__}.{kind.__name__}" + (" with lora_bias" if biased else "")
        raise MappingError(f"adapter of module {name!r}", expected="LoRA or DoRA without a bias of its own, on plain "
                           "weights (not QLoRA's)", got=got, remedy=_REMEDY)  # fmt: skip
