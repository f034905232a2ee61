"""The oracle of the sharded tests: whole weights, gathered from all ranks, as a saved checkpoint would hold them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import tiny
import torch
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback

from trl_callback.serving_image import plain_name


def gathered(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """In-memory name -> whole parameter on the CPU; a collective."""
    return {plain_name(name).removeprefix("module."): _whole(parameter) for name, parameter in model.named_parameters()}


def _whole(parameter: Any) -> torch.Tensor:
    if isinstance(parameter, DTensor):
        return parameter.full_tensor().detach().cpu().clone()
    if hasattr(parameter, "ds_tensor"):
        import deepspeed

        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().cpu().clone()
    return parameter.detach().cpu().clone()


def checkpoint(build: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What save_pretrained would write of a fresh, whole model with these weights, cast to what is served."""
    model = build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return tiny.cast_state(model)


class KeepEveryStep(TrainerCallback):
    """Writes the gathered weights of each step to ``folder/step-N.pt`` on rank 0."""

    def __init__(self, build: Any, folder: Path) -> None:
        self.build, self.folder = build, folder

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.keep(model, 0)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.keep(model, state.global_step)

    def keep(self, model: Any, step: int) -> None:
        weights = gathered(model)
        if torch.distributed.get_rank() == 0:
            torch.save(checkpoint(self.build, weights), self.folder / f"step-{step}.pt")
