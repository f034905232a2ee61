"""``delta_sync/…`` numbers, averaged over the steps between two logs, in the trainer's own logs."""

from __future__ import annotations

import math
import threading
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from delta_sync.strict_json import NUMBER_NAME, NUMBERS
from trl_callback.ranks import is_main

PREFIX = "delta_sync/"
FIRST = ("reward", "reward_std", "loss", "kl", "learning_rate", "grad_norm", "entropy", "epoch")  # of too many numbers
LATEST = {"version"}  # an average would say nothing
MEANING = {  # of each number that is recorded
    "version": "newest version published",
    "changed_elements": "elements that a version changes",
    "changed_fraction": "the same as a share of the model",
    "bytes": "size of a version's objects",
    "bytes_per_changed": "the same for each changed element",
    "extract_seconds": "comparing the model with what was published last, on the training thread",
    "publish_seconds": "encoding, uploading and committing a version, in the background",
    "wait_seconds": "rollouts waiting for weights that are new enough; training waiting for a batch that runs ahead",
    "ahead_seconds": "with `rollouts_ahead`: generating a batch while the trainer steps, the wait for weights included",
    "ahead_unweighted": "with `rollouts_ahead`: share of such completions that TRL's correction gives no weight",
    "staleness": "steps by which the weights that rollouts come from are older",
    "anchor_bytes": "size of complete weights that were attached",
    "anchor_seconds": "from the begin of such an upload to its end, versions in between included",
    "store_failures": "1 where the store failed and was tried again",
    "heals": "1 where a replica's refusal was answered, by putting an object again or by complete weights",
    "parity_k3_mean": "with `parity_every`: k3 of trainer and server in nats, the mean of a batch's tokens",
    "parity_k3_max": "the same, of the token where it is largest",
}


class Metrics:
    """Numbers recorded from any thread, taken out as one flat dict; and those of the trainer's last log."""

    def __init__(self) -> None:
        self._logged: dict[str, float] = {}
        self._lock = threading.Lock()
        self._values: dict[str, list[float]] = defaultdict(list)

    def record(self, **values: float) -> None:
        """Add one observation of each named number."""
        with self._lock:
            for name, value in values.items():
                self._values[name].append(float(value))

    def note(self, logs: Mapping[str, Any]) -> None:
        """Remember a training log's own numbers, as far as a manifest can hold them: 64, the best known ones first."""
        kept = {n: float(v) for n, v in logs.items() if not n.startswith(PREFIX) and _is_publishable(n, v)}
        order = sorted(kept, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))
        with self._lock:
            self._logged = {name: kept[name] for name in order[:NUMBERS]}

    def logged(self) -> dict[str, float]:
        """What the last training log said, empty before the first."""
        with self._lock:
            return dict(self._logged)

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
    metrics.note(logs)
    taken = metrics.take()
    logs.update(taken)
    if state.log_history and state.log_history[-1].get("step") == state.global_step:
        state.log_history[-1].update(taken)


def _is_publishable(name: str, value: object) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and math.isfinite(value) and NUMBER_NAME.fullmatch(name) is not None  # type: ignore[arg-type]


class LogNumbers(TrainerCallback):
    """Adds ``delta_sync/…`` to a trainer's logs."""

    def __init__(self, metrics: Metrics) -> None:
        self.metrics = metrics

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Before the reporters read it."""
        if logs is not None and is_main():
            add_to_logs(self.metrics, logs, state)


def log_first(trainer: Trainer, metrics: Metrics) -> None:
    """Have the numbers added before the reporters (wandb, trackio, …) see a log; other callbacks keep their order."""
    handler = trainer.callback_handler
    others = [one for one in handler.callbacks if not (isinstance(one, LogNumbers) and one.metrics is metrics)]
    handler.callbacks = [LogNumbers(metrics), *others]  # a new list: the trainer is in the middle of the old one
