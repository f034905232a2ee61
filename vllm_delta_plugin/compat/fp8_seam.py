"""Seam: vLLM's fp8 methods, whose work on a loaded module can be done again for new weights (vLLM 0.26 to 0.32).

vLLM quantises (or, of a checkpoint in blocks of fp8, rearranges) one module at a time, as soon as it is loaded. Just
before that its parameters are copied to host memory, with their class and loader, so that the load can be traced into
the copies. Later the same method of vLLM's makes of changed parameters what a fresh load would serve.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.process_seam import PROCESS, again, as_parameter
from vllm_delta_plugin.compat.seam import SeamError, require, wrap
from vllm_delta_plugin.shadow import host_copy

_LAYERS = "vllm.model_executor.layers"
_ONLINE = f"{_LAYERS}.quantization.online.fp8"
_METHODS = {
    _ONLINE: ("Fp8PerTensorOnlineLinearMethod", "Fp8PtpcOnlineLinearMethod", "Fp8PerBlockOnlineLinearMethod"),
    f"{_LAYERS}.quantization.fp8": ("Fp8LinearMethod",),
}
_EXPERTS = {
    _ONLINE: ("Fp8PerTensorOnlineMoEMethod", "Fp8PtpcOnlineMoEMethod", "Fp8PerBlockOnlineMoEMethod"),
    f"{_LAYERS}.quantization.fp8": ("Fp8MoEMethod",),
}
_KERNEL = "get_fused_moe_quant_config"  # what experts ask for once their weights are made, to build a kernel
_LINEAR = "fp8_linear"  # the kernel of a linear layer's method
_PLAIN = (  # leave weights as they are loaded, or have none
    "UnquantizedLinearMethod",
    "UnquantizedEmbeddingMethod",
    "UnquantizedFusedMoEMethod",
    "Fp8KVCacheMethod",
)
_BUILD = "initialize_model"
_DONE, _SCRATCH = f"_already_called_{PROCESS}", "_delta_sync_scratch"
_CAPTURED = "_delta_sync_captured"  # on the module itself: loaders refer to it, so no weak dictionary would let it go
_ORIGIN = "_delta_sync_origin"  # on a parameter and its copies: the same object
_SHARED_SCALES = ("amax_for_tp_weight_quant", "amax_for_moe_weight_quant")  # since 0.30: ranks agree on one scale
_missing: SeamError | None = None
_shared = False  # whether the module that is being processed has a scale that other ranks have a part in


@dataclass(frozen=True)
class Captured:
    """A module as it was loaded: copies of its parameters in host memory, by name; ``alone``: no rank joins in."""

    parameters: Mapping[str, torch.Tensor]
    alone: bool


def install() -> None:
    """Have the methods wrapped before a quantised model is built; SeamError names what vLLM lacks, once one is."""
    global _missing
    from vllm.model_executor.model_loader import base_loader

    try:
        require(base_loader, _BUILD)
    except SeamError as error:
        _missing = error
        return
    original = getattr(base_loader, _BUILD)
    if getattr(original, "__delta_sync_wraps__", False):
        return

    @functools.wraps(original)
    def initialize_model(vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        if vllm_config.model_config.quantization:
            _wrap_methods()
        return original(vllm_config, *args, **kwargs)

    initialize_model.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    setattr(base_loader, _BUILD, initialize_model)


def _wrap_methods() -> None:
    global _missing
    try:
        for method in _methods():
            wrap(method, PROCESS, _capturing)
        online = importlib.import_module(_ONLINE)
        for name in _SHARED_SCALES:
            if hasattr(online, name) and not hasattr(getattr(online, name), "__delta_sync_wraps__"):
                setattr(online, name, _noting(getattr(online, name)))
    except SeamError as error:
        _missing = error


def _methods() -> list[type]:
    found = []
    for name, classes in _METHODS.items():
        try:
            module = importlib.import_module(name)
        except ImportError:
            raise SeamError(f"vLLM seam {name}", expected="a module", got="none") from None
        require(module, *classes)
        found += [getattr(module, each) for each in classes]
        for each in _EXPERTS[name]:  # where they are gone, models with experts are refused
            if hasattr(getattr(module, each, None), _KERNEL):
                found.append(getattr(module, each))
    return found


def quantised(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The model's modules, by name, whose weights vLLM transforms in a way that can be done again.

    MappingError for one that it transforms otherwise; SeamError if vLLM is not as expected.
    """
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if method is None or not hasattr(method, PROCESS) or type(method).__name__ in _PLAIN:
            continue
        if _missing is not None:
            raise _missing
        if (reason := _why_not(method)) is not None:
            raise MappingError(
                f"weights of module {name!r}",
                expected="online fp8, or a checkpoint in blocks of fp8, of linear layers",
                got=reason,
                remedy="serve the unquantised checkpoint",
            )
        found[name] = module
    return found


def _why_not(method: Any) -> str | None:
    """Why what this method makes of weights is not made again; None if it is."""
    kind = type(method).__name__
    if not isinstance(method, tuple(_methods())):
        return kind
    if not hasattr(method, _KERNEL):
        require(method, _LINEAR)
        if "Marlin" in type(getattr(method, _LINEAR)).__name__:
            return f"{kind} with Marlin's layout, as on GPUs without fp8 products"
    if getattr(method, "requantization_source", None) is not None:  # since 0.32
        return f"{kind} over a checkpoint that is quantised otherwise"
    if kind in ("Fp8LinearMethod", "Fp8MoEMethod") and not getattr(method, "block_quant", False):
        return "a checkpoint of fp8 with one scale a tensor"
    return None


def captured(module: torch.nn.Module) -> Captured:
    """The module as it was loaded; the copy is made now, unless vLLM has processed the module already."""
    if _CAPTURED not in vars(module):
        for parameter in module._parameters.values():
            if parameter is not None:
                vars(parameter).setdefault(_ORIGIN, object())
        parameters = {n: as_parameter(host_copy(p), p) for n, p in module._parameters.items() if p is not None}
        vars(module)[_CAPTURED] = Captured(parameters, alone=True)
    found: Captured = vars(module)[_CAPTURED]
    return found


def held_twice(model: torch.nn.Module, modules: Mapping[str, torch.nn.Module]) -> set[tuple[str, str]]:
    """Of the modules' parameters, (module, name), those that another module held when vLLM processed the first."""
    names = {module: name for name, module in modules.items()}
    places: dict[object, set[tuple[str, str]]] = {}
    for path, module in model.named_modules():
        copies = captured(module).parameters.items() if module in names else ()
        for part, parameter in (*module._parameters.items(), *copies):
            if (origin := getattr(parameter, _ORIGIN, None)) is not None:
                places.setdefault(origin, set()).add((names.get(module, path), part))
    shared = (found for found in places.values() if len({module for module, _ in found}) > 1)
    return {place for found in shared for place in found}


def release(module: torch.nn.Module, name: str) -> None:
    """Free the copy of a parameter that vLLM leaves as it is."""
    found = captured(module)
    left = {n: as_parameter(torch.empty(0, dtype=p.dtype), p) if n == name else p for n, p in found.parameters.items()}
    vars(module)[_CAPTURED] = Captured(left, found.alone)


@contextmanager
def as_loaded(modules: Mapping[str, torch.nn.Module]) -> Iterator[None]:
    """Meanwhile the modules' parameters are the copies in host memory."""
    live = {module: module._parameters for module in modules.values()}
    try:
        for module in live:
            module.__dict__["_parameters"] = dict(captured(module).parameters)
        yield
    finally:
        for module, parameters in live.items():
            module.__dict__["_parameters"] = parameters


class _Made(Exception):
    """The weights are made; what follows is a kernel, which nobody needs."""


def process(module: torch.nn.Module, method: Any, loaded: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """What ``method`` makes of the module with these parameters; itself it stays as it is; on the current stream."""
    known = captured(module).parameters
    attributes = {name: value for name, value in vars(module).items() if name != _DONE}
    attributes |= {_SCRATCH: True, "quant_method": method}
    method = copy.copy(method)
    if hasattr(method, _KERNEL):
        vars(method)[_KERNEL] = _made
    like = {name: as_parameter(tensor, known[name]) for name, tensor in loaded.items()}
    return again(type(module), attributes, method, like, stop=_Made)


def _made(*_: Any) -> None:
    raise _Made


def derived(module: torch.nn.Module, method: Any) -> str | None:
    """What the kernel of experts computes with that is not their parameters, so that deltas would leave it stale."""
    if not hasattr(method, _KERNEL):
        return None
    require(method, "moe_quant_config")
    held = {p.untyped_storage().data_ptr() for p in module._parameters.values() if p is not None}
    config = method.moe_quant_config
    for name, part in vars(config).items() if config is not None else ():
        for field, value in {name: part, **getattr(part, "__dict__", {})}.items():
            if isinstance(value, torch.Tensor) and value.untyped_storage().data_ptr() not in held:
                return f"{name}.{field}"
    return None


def _capturing(original: Callable[..., Any]) -> Callable[..., Any]:
    def process_weights_after_loading(self: Any, layer: Any) -> Any:
        global _shared
        if _SCRATCH in vars(layer) or _why_not(self) is not None or getattr(layer, _DONE, False):
            return original(self, layer)
        found, _shared = captured(layer), False
        result = original(self, layer)
        if _shared:
            vars(layer)[_CAPTURED] = Captured(found.parameters, alone=False)
        return result

    return process_weights_after_loading


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def noted(amax: Any, ranks: int) -> Any:
        global _shared
        _shared = _shared or ranks > (0 if isinstance(ranks, bool) else 1)  # whether it is shared, or by how many
        return original(amax, ranks)

    noted.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    return noted
