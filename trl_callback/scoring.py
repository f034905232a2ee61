"""The trainer's side of a comparison: log-probabilities of given tokens, by transformers, in a chosen precision."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Scored(NamedTuple):
    """Of each completion token: its log-probability, float32 ``[n]``, and the most probable token, int64 ``[n]``."""

    logprobs: np.ndarray
    top1: np.ndarray


def score(
    folder: Path, sequences: Sequence[tuple[Sequence[int], Sequence[int]]], dtype: str, device: str
) -> list[Scored]:
    """Score completions after their prompts, one sequence at a time, at temperature 1.

    ``dtype``: the weights' and the computation's, or ``autocast``: float32 weights computed with in bfloat16, as
    transformers' ``bf16=True`` does.
    """
    disable_progress_bar()  # type: ignore[no-untyped-call, unused-ignore]  # of the weights being loaded, on standard error
    autocast = dtype == "autocast"
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=DTYPES["float32" if autocast else dtype]
    )
    model = model.to(device).eval()
    compute = torch.autocast(device, torch.bfloat16) if autocast else contextlib.nullcontext()
    with torch.inference_mode(), compute:
        return [_score(model, prompt, completion, device) for prompt, completion in sequences]


def _score(model: torch.nn.Module, prompt: Sequence[int], completion: Sequence[int], device: str) -> Scored:
    ids = torch.tensor([[*prompt, *completion]], device=device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    found = logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None])[:, 0]
    return Scored(found.cpu().numpy(), logits.argmax(-1).cpu().numpy())
