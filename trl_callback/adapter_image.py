"""A LoRA adapter as the server should hold it: PEFT's names, serving element type, bits; and its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from delta_sync.adapter import PREFIX, AdapterConfig
from delta_sync.errors import MappingError
from trl_callback.adapters import Adapters
from trl_callback.serving_image import ServingImage, Source

_REMEDY = 'set lora="merged", or leave the base frozen, and the adapter as LoRA makes it'


class AdapterImage(ServingImage):
    """Walks the one active adapter of a model whose other weights are frozen; used wherever a ServingImage is.

    ``config`` is what PEFT would save of it. MappingError, naming what vLLM or PEFT can't serve over plain weights.
    """

    def __init__(self, model: nn.Module, serving_dtype: str) -> None:
        super().__init__(model, lambda name: serving_dtype)
        self.config = _config(self._model, Adapters(self._model))

    def sources(self) -> Iterator[Source]:
        """A and B of every adapted module, not cast yet, where the model has them."""
        adapters = Adapters(self._model)
        config = _config(self._model, adapters)  # anew, as whoever trains may change what the server can't follow
        # What is for PEFT alone may change: servers don't see it.
        if config != replace(self.config, base_model=config.base_model, task_type=config.task_type):
            _refuse("adapter", f"as at the start, {self.config}", config)
        for module, layer in adapters.layers.items():
            [adapter] = layer.active_adapters
            if layer.merged_adapters:
                raise MappingError(f"module {module!r}", expected="the adapter beside the weights",
                                   got="merged into them", remedy="call unmerge_adapter() first")  # fmt: skip
            for kind, name in (("lora_A", ".weight"), ("lora_B", ".weight"), ("lora_embedding_A", ""),
                               ("lora_embedding_B", "")):  # fmt: skip
                held = getattr(layer, kind)
                if adapter in held:
                    tensor = held[adapter].weight if name else held[adapter]
                    yield self._source(f"{PREFIX}{module}.{kind}{name}", tensor.detach())


def adapter_sizes(model: nn.Module) -> tuple[int, int]:
    """Elements of a model's adapters, and of the weights that merging them changes."""
    layers = Adapters(model).layers.values()
    small = sum(p.numel() for layer in layers for name, p in layer.named_parameters() if "lora_" in name)
    return small, sum(layer.base_layer.weight.numel() for layer in layers)


def _config(model: nn.Module, adapters: Adapters) -> AdapterConfig:
    """What the adapted layers have in common; MappingError where they differ, are more than LoRA, or not alone."""
    if not adapters.layers:
        _refuse("model", "a LoRA adapter", "none")
    if adapters.copied:
        _refuse(f"module {adapters.copied[0]!r}", "only LoRA", "a layer trained whole (modules_to_save)")
    _check_frozen(model, adapters)
    first: tuple[str, int, float, float] | None = None
    for module, layer in adapters.layers.items():
        names = list(layer.active_adapters)
        if len(names) != 1:
            _refuse(f"module {module!r}", "one active adapter", names)
        [name] = names
        if type(layer).__name__ not in ("Linear", "Embedding"):
            _refuse(f"adapter of module {module!r}", "LoRA on linear and embedding layers", type(layer).__name__)
        if name in layer.lora_variant:
            _refuse(f"adapter of module {module!r}", "plain LoRA", type(layer.lora_variant[name]).__name__)
        found = name, layer.r[name], layer.lora_alpha[name], layer.scaling[name]
        if first is not None and found != first:
            expected = f"one rank and alpha for all modules, {_said(first)}"
            _refuse(f"adapter of module {module!r}", expected, _said(found))
        first = found
    assert first is not None
    name, r, alpha, scaling = first
    settings = _settings(model, name)
    rslora = bool(getattr(settings, "use_rslora", False))
    config = AdapterConfig(r, alpha, _targets(model, adapters), rslora, _path(model, settings), _task(settings))
    if abs(config.scaling - scaling) > 1e-6 * abs(scaling):
        _refuse(f"adapter {name!r}", f"scaling {config.scaling:g}, of its rank and alpha", f"{scaling:g}")
    return config


def _said(adapter: tuple[str, int, float, float]) -> str:
    return "{!r} with rank {}, alpha {:g}, scaling {:g}".format(*adapter)


def _settings(model: nn.Module, adapter: str) -> Any:
    """PEFT's LoraConfig, which both ways of adding an adapter leave at the base model."""
    configs: Any = getattr(model, "peft_config", None) or {}
    return configs.get(adapter)


def _targets(model: nn.Module, adapters: Adapters) -> tuple[str, ...]:
    """Last parts of names where those say exactly which modules are adapted, else full names."""
    last = {name.rpartition(".")[2] for name in adapters.layers}
    others = (name for name, _ in model.named_modules() if name not in adapters.layers and ".base_layer" not in name)
    exact = not any(name.rpartition(".")[2] in last and not _inside(name, adapters) for name in others)
    return tuple(sorted(last if exact else adapters.layers))


def _inside(name: str, adapters: Adapters) -> bool:
    return any(name.startswith(f"{layer}.") for layer in adapters.layers)


def _path(model: nn.Module, settings: Any) -> str | None:
    path = getattr(settings, "base_model_name_or_path", None) or getattr(model, "name_or_path", None)
    return str(path) if path else None


def _task(settings: Any) -> str | None:
    task = getattr(settings, "task_type", None)
    return str(getattr(task, "value", task)) if task else None


def _check_frozen(model: nn.Module, adapters: Adapters) -> None:
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and adapters.plain_name(name) is not None:
            _refuse(f"parameter {name!r}", "frozen: the adapter alone is published", "trained")


def _refuse(what: str, expected: str, got: object) -> None:
    raise MappingError(f'{what}, with lora="adapter"', expected=expected, got=got, remedy=_REMEDY)
