"""Seam: what latent attention (MLA) makes of ``kv_b_proj`` once all is loaded, made again (vLLM 0.26 to 0.32).

Of a projection that is not quantised, ``W_UK_T`` and ``W_UV`` are views; of one that is, they are products of its bits.
"""

from __future__ import annotations

import copy
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.process_seam import PROCESS, Alone, scratch_of

_PROJECTION, _KERNEL = "kv_b_proj", "impl"
_MADE = {"W_UK_T", "W_UV"}


@dataclass(frozen=True)
class Reader:
    """A module that computes with what it made of a projection; ``dtype``: the model's, in which it did."""

    name: str
    module: torch.nn.Module
    dtype: torch.dtype

    def make(self, projection: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What it would make of this projection, by attribute; the module itself stays as it is.

        MappingError if it makes more than is known, or other ranks have a part in it.
        """
        given: dict[str, Any] = dict(vars(self.module))
        given["_modules"] = {**given["_modules"], _PROJECTION: projection}
        kernel = given[_KERNEL] = copy.copy(given[_KERNEL])
        if hasattr(kernel, _PROJECTION):
            setattr(kernel, _PROJECTION, projection)
        scratch = scratch_of(type(self.module), given, {})  # without parameters: they would be written over
        with torch.no_grad(), Alone(f"what vLLM makes of module {self.name!r}"):
            getattr(scratch, PROCESS)(self.dtype)
        kept = _new(vars(kernel), vars(vars(self.module)[_KERNEL]))
        made = _new({**scratch._parameters, **vars(scratch)}, given)
        if kept or made.keys() != _MADE:
            raise MappingError(
                f"weights of module {self.name!r}",
                expected=f"{' and '.join(sorted(_MADE))} as all that is made of {_PROJECTION}",
                got=f"{sorted(made)}, and by {type(kernel).__name__} {sorted(kept)}",
                remedy="serve the unquantised checkpoint, or with another --attention-backend",
            )
        return {name: tensor.detach() for name, tensor in made.items()}


def _new(held: dict[str, Any], given: dict[str, Any]) -> dict[str, torch.Tensor]:
    """The tensors that were not given, but for scalars: those are settings of the cache."""
    tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor) and value.ndim}
    return {name: tensor for name, tensor in tensors.items() if tensor is not given.get(name)}


def readers(
    model: torch.nn.Module, projections: Collection[torch.nn.Module], dtype: torch.dtype
) -> dict[torch.nn.Module, Reader]:
    """The modules of latent attention, by which of the projections they read; MappingError where two read one."""
    found: dict[torch.nn.Module, Reader] = {}
    for name, module in model.named_modules():
        projection: Any = module._modules.get(_PROJECTION)
        if projection not in projections or not hasattr(module, PROCESS):
            continue
        if projection in found:
            names = f"{found[projection].name!r} and {name!r}"
            raise MappingError(f"{_PROJECTION} of modules {names}", expected="one each", got="the same")
        found[projection] = Reader(name, module, dtype)
    return found
