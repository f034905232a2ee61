"""Live weights that are damaged, or loaded in place for as long as a test needs, as a vLLM plugin."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

DAMAGE = "LIVE_MEMORY_DAMAGE"  # names a file: the next scan finds one bit of the weights flipped, and the file is gone
LOADING = "LIVE_MEMORY_LOADING"  # names a file: a load in place does not end while it is there
_LONGEST = 60.0  # seconds


def install() -> None:
    """Do what the files ask for that the environment names; called by vLLM."""
    import torch

    from vllm_delta_plugin import rank_sync

    rank: Any = rank_sync.RankSync
    begin, load = rank.audit_begin, rank_sync.load_dense
    damage, loading = Path(os.environ[DAMAGE]), Path(os.environ[LOADING])

    def audit_begin(self: Any, again: bool = False) -> Any:
        if damage.exists():
            damage.unlink()
            with torch.inference_mode():
                self.weights.storages[0].bits[0] ^= 1
        return begin(self, again)

    def load_dense(*args: Any) -> Any:
        """All is written, and nobody knows yet whether it is right."""
        written, deadline = load(*args), time.monotonic() + _LONGEST
        while loading.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        return written

    rank.audit_begin, rank_sync.load_dense = audit_begin, load_dense
