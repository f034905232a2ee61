"""One rank of a sharded run: argv is a JSON object; the strategy is in the environment, as accelerate has it."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import accelerate_on_cpu  # noqa: F401
import grpo
import no_vllm  # noqa: F401
import tiny
import torch
from end_of_rank import leave_groups
from gathered import KeepEveryStep
from transformers import TrainerCallback

from delta_sync.claims import claim_reset
from delta_sync.errors import DeltaSyncError
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback

ZERO = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"


class ResetAfter(TrainerCallback):
    """Has the chain forgotten once ``step`` is done, while it may be on its way: what ``delta-sync reset`` does."""

    def __init__(self, step: int, uri: str) -> None:
        self.step, self.uri = step, uri

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step and state.is_world_process_zero:
            claim_reset(Ledger(open_store(self.uri)))


def main() -> None:
    said = json.loads(sys.argv[1])
    folder = Path(said["folder"])
    build = getattr(tiny, said.get("model", "llama"))
    sync = DeltaSyncCallback(said["uri"], **said.get("settings", {}))
    callbacks = [KeepEveryStep(build, folder), sync]
    if "reset_after" in said:
        callbacks.append(ResetAfter(said["reset_after"], said["uri"]))
    on_cpu = not torch.cuda.is_available() and not ZERO  # as accelerate has it, what uses the CPU is not DeepSpeed
    arguments = {"bf16": True, "use_cpu": on_cpu, **said.get("arguments", {})}
    if said.get("url"):
        trainer = grpo.grpo_trainer(
            folder,
            model=build(),
            url=said["url"],
            use_vllm=True,
            callbacks=callbacks,
            max_steps=said["steps"],
            **arguments,
        )
    else:
        trainer = grpo.plain_trainer(folder, model=build(), callbacks=callbacks, steps=said["steps"], **arguments)
    rank = torch.distributed.get_rank()
    try:
        trainer.train()
    except DeltaSyncError as error:
        print(f"rank {rank} raised {type(error).__name__}: {error}", flush=True)
    else:
        print(f"rank {rank} trained {trainer.state.global_step}", flush=True)
    sync.close()
    leave_groups()


if __name__ == "__main__":
    main()
