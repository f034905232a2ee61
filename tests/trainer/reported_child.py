"""A training process that reports to every tracker; argv is {"folder", "uri"} in JSON. One of several if so started."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

import grpo
import tiny
from end_of_rank import leave_groups
from transformers import TrainerCallback

from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback


class Published(TrainerCallback):
    """Each step's version is in the bucket before the next step, however slow the machine."""

    def __init__(self, uri: str) -> None:
        self.ledger = Ledger(open_store(uri))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        end = time.monotonic() + 60
        while (newest := self.ledger.head()) is None or newest.steps[1] < state.global_step:
            assert time.monotonic() < end, "no version within 60 s"
            time.sleep(0.02)


SHARDED = "WORLD_SIZE" in os.environ
if SHARDED:
    import accelerate_on_cpu  # noqa: F401


def main() -> None:
    said = json.loads(sys.argv[1])
    sync = DeltaSyncCallback(said["uri"])
    reporters = ["tensorboard", "wandb", "trackio"]
    trainer = grpo.plain_trainer(
        said["folder"],
        model=tiny.llama(),
        callbacks=[sync, Published(said["uri"])],
        bf16=True,
        report_to=reporters,
        run_name="tiny",
    )
    trainer.train()
    sync.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps(logged), flush=True)
    leave_groups()


if __name__ == "__main__":
    main()
