"""``delta_sync/…`` numbers, averaged over the steps between two logs, in the trainer's own logs."""

from __future__ import annotations

import threading
from collections import defaultdict
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerState

PREFIX = "delta_sync/"
LATEST = {"version"}  # an average would say nothing


class Metrics:
    """Numbers recorded from any thread, taken out as one flat dict."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values: dict[str, list[float]] = defaultdict(list)

    def record(self, **values: float) -> None:
        """Add one observation of each named number."""
        with self._lock:
            for name, value in values.items():
                self._values[name].append(float(value))

    def take(self) -> dict[str, float]:
        """``delta_sync/name`` -> mean (the latest for version) since the last take."""
        with self._lock:
            values, self._values = self._values, defaultdict(list)
        return {
            f"{PREFIX}{name}": seen[-1] if name in LATEST else sum(seen) / len(seen) for name, seen in values.items()
        }


def add_to_logs(metrics: Metrics, logs: dict[str, Any], state: TrainerState) -> None:
    """Put the numbers into a training log, and into the history entry that the trainer made of it just before."""
    if "loss" not in logs:
        return  # an evaluation's log, or the final summary
    taken = metrics.take()
    logs.update(taken)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(taken)


def log_first(trainer: Trainer, callback: TrainerCallback) -> None:
    """Move ``callback`` before the reporters (wandb, trackio, …), so that they see what it adds to the logs."""
    callbacks = trainer.callback_handler.callbacks
    if callback in callbacks:
        callbacks.remove(callback)
        callbacks.insert(0, callback)
