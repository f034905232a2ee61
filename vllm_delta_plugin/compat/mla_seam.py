"""Seam: what latent attention (MLA) makes of ``kv_b_proj`` once all is loaded, made again (vLLM 0.26 to 0.32).

Of a projection that is not quantised, ``W_UK_T`` and ``W_UV`` are views; of one that is, they are products of its bits.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch

from vllm_delta_plugin.compat.process_seam import PROCESS, Alone

_PROJECTION, _KERNEL = "kv_b_proj", "impl"


@dataclass(frozen=True)
class Reader:
    """A module that computes with what it made of a projection; ``dtype``: the model's, in which it did."""

    name: str
    module: torch.nn.Module
    dtype: torch.dtype

    def make(self, projection: torch.nn.Module) -> dict[str, torch.Tensor]:
        """What it would make of this projection, by attribute; the module itself stays as it is.

        MappingError if other ranks have a part in it.
        """
        attributes = dict(vars(self.module))
        scratch = object.__new__(type(self.module))
        scratch.__dict__.update(attributes)
        scratch.__dict__["_parameters"] = dict.fromkeys(attributes["_parameters"])  # what is there is written over
        scratch.__dict__["_modules"] = {**attributes["_modules"], _PROJECTION: projection}
        if _KERNEL in attributes:
            scratch.__dict__[_KERNEL] = copy.copy(attributes[_KERNEL])
        with torch.no_grad(), Alone(f"what vLLM makes of module {self.name!r}"):
            getattr(scratch, PROCESS)(self.dtype)
        held = {**scratch._parameters, **vars(scratch)}
        tensors = {name: value for name, value in held.items() if isinstance(value, torch.Tensor)}
        return {name: value.detach() for name, value in tensors.items() if value is not attributes.get(name)}


def readers(model: torch.nn.Module, dtype: torch.dtype) -> dict[torch.nn.Module, Reader]:
    """The modules of latent attention, by the projection they read."""
    found = {}
    for name, module in model.named_modules():
        if hasattr(module, PROCESS) and (projection := module._modules.get(_PROJECTION)) is not None:
            found[projection] = Reader(name, module, dtype)
    return found
