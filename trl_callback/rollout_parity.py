"""How far trainer and server are apart on a batch, from log-probabilities that TRL has computed anyway."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import torch

from delta_sync.mismatch import Mismatch, mismatch

logger = logging.getLogger(__name__)
TRAINER, SERVER, MASKS = "old_per_token_logps", "sampling_per_token_logps", ("completion_mask", "tool_mask")


def batch_parity(trainer: Any) -> Mismatch | None:
    """Of the batch that TRL's trainer holds now, on this rank; None where it has not both sides' log-probabilities.

    The trainer's are those that TRL computes for its importance-sampling correction, with the weights that it had
    when the batch was made: those are the server's too where ``max_staleness`` is 0, and what is left is kernels.
    """
    batches = getattr(trainer, "_buffered_inputs", None)
    pairs = [_pair(batch) for batch in batches or () if isinstance(batch, dict)]
    known = [pair for pair in pairs if pair is not None]
    if not known:
        return None
    ours, theirs = (np.concatenate(side) for side in zip(*known, strict=True))
    return mismatch(ours, theirs)


def warn_once_without(found: Mismatch | None, warned: bool) -> bool:
    """Say once why there is no number; whether it was said."""
    if found is None and not warned:
        logger.warning(
            "delta-sync: parity_every is set, but TRL holds no log-probabilities of both sides. Remedy: train with "
            "use_vllm and vllm_importance_sampling_correction=True, or use delta-sync parity",
        )
    return warned or found is None


def _pair(batch: dict[str, Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Both sides of what the model itself wrote, float32 ``[n]`` each."""
    ours, theirs = batch.get(TRAINER), batch.get(SERVER)
    if not (isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor)):
        return None
    mask = torch.ones_like(ours, dtype=torch.bool)
    for name in MASKS:
        if isinstance(batch.get(name), torch.Tensor):
            mask &= batch[name].bool()
    return ours[mask].detach().float().cpu().numpy(), theirs[mask].detach().float().cpu().numpy()
