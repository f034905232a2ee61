"""Seam: vLLM's processing of one loaded module, done again on a module that nobody serves (vLLM 0.26 to 0.32)."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from delta_sync.errors import MappingError

PROCESS = "process_weights_after_loading"
_BETWEEN_RANKS = {"c10d", "_c10d_functional"}
_VLLMS = {"vllm", "_C"}
_EXCHANGE = re.compile("all_?reduce|all_?gather|reduce_scatter|all_to_all|broadcast|shm_")
_HELD = ("_parameters", "_buffers", "_modules")  # of a torch module: what it holds by name


@dataclass(frozen=True)
class Unprocessed:
    """A module before vLLM processed it, without its weights: ``parameters`` are on the meta device.

    ``whole``: each parameter lies row-major in memory of its own.
    """

    kind: type[torch.nn.Module]
    attributes: Mapping[str, Any]
    method: Any
    parameters: Mapping[str, torch.Tensor]
    whole: bool

    @property
    def signature(self) -> tuple[object, ...]:
        """Equal for modules that are taken to be processed alike; where they are not, their digests tell."""
        forms = [(n, tuple(p.shape), p.stride(), p.dtype) for n, p in self.parameters.items()]
        return (self.kind, type(self.method), *forms)

    def process(self, parameters: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """What vLLM makes of these values of the module's parameters, some of which it may write to.

        MappingError if other ranks have a part in it.
        """
        like = {name: as_parameter(tensor, self.parameters[name]) for name, tensor in parameters.items()}
        with Alone():
            return parameters_of(again(self.kind, self.attributes, self.method, like))


class Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Meanwhile torch's and vLLM's own exchanges between ranks are refused: others may not be there to take part.

    What is compiled runs as it is written meanwhile; if that gave other bits, the proof at the start would find them.
    """

    def __init__(self, what: str = "what vLLM makes of it") -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._what = what

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _BETWEEN_RANKS or (func.namespace in _VLLMS and _EXCHANGE.search(str(func))):
            raise MappingError(self._what, expected="of this rank's weights alone", got=f"a call of {func}")
        return func(*args, **kwargs or {})


def unprocessed(model: torch.nn.Module) -> dict[str, Unprocessed]:
    """The modules that vLLM is about to process, by name."""
    found = {}
    for name, module in model.named_modules():
        method = getattr(module, "quant_method", None)
        if not hasattr(method, PROCESS):
            continue
        parts = {n: p for n, p in module._parameters.items() if p is not None}
        forms = {n: as_parameter(torch.empty_like(p, device="meta"), p) for n, p in parts.items()}
        attributes = dict(vars(module)) | {"_parameters": dict.fromkeys(module._parameters)}
        whole = all(p.is_contiguous() and p.untyped_storage().nbytes() == p.nbytes for p in parts.values())
        found[name] = Unprocessed(type(module), attributes, _copy(method), forms, whole)
    return found


def again(
    kind: type[torch.nn.Module],
    attributes: Mapping[str, Any],
    method: Any,
    parameters: Mapping[str, torch.Tensor],
    stop: type[Exception] | None = None,
) -> torch.nn.Module:
    """A scratch module as a copy of ``method`` leaves it, also if it raises ``stop``.

    On the current stream. What the scratch module is given, or has written to, is its own.
    """
    scratch = scratch_of(kind, attributes, parameters)
    with torch.no_grad(), suppress(*[stop] if stop else ()):
        getattr(_copy(method), PROCESS)(scratch)
    return scratch


def scratch_of(
    kind: type[torch.nn.Module], attributes: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]
) -> torch.nn.Module:
    """A module with these parameters and no others, and with buffers of its own; the modules it holds are shared."""
    scratch: torch.nn.Module = object.__new__(kind)
    scratch.__dict__.update(attributes)
    scratch.__dict__["_parameters"] = {**dict.fromkeys(attributes["_parameters"]), **parameters}
    buffers: Mapping[str, torch.Tensor | None] = attributes["_buffers"]
    scratch.__dict__["_buffers"] = {name: None if b is None else b.clone() for name, b in buffers.items()}
    scratch.__dict__["_modules"] = dict(attributes["_modules"])
    return scratch


def parameters_of(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A module's own parameters, by name."""
    return {name: p.detach() for name, p in module._parameters.items() if p is not None}


def _copy(method: Any) -> Any:
    """A copy that may be given other parts."""
    other = copy.copy(method)
    if isinstance(method, torch.nn.Module):  # as vLLM's for experts without quantisation
        other.__dict__.update({held: dict(vars(method)[held]) for held in _HELD})
    return other


def as_parameter(tensor: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The tensor as a parameter of the same class, loader and attributes."""
    tensor.__class__ = parameter.__class__
    tensor.__dict__ = parameter.__dict__.copy()
    return tensor
