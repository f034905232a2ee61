"""A trainer to be killed: argv is folder, uri, steps; says "training" once it is, saves its final cast weights."""

from __future__ import annotations

import sys
from typing import Any

import grpo
import tiny
import torch
from transformers import TrainerCallback

from trl_callback import DeltaSyncCallback


class Say(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            print("training", flush=True)


def main() -> None:
    folder, uri, steps = sys.argv[1:]
    sync = DeltaSyncCallback(uri, anchor_every=3)
    trainer = grpo.plain_trainer(
        folder,
        model=tiny.llama(),
        callbacks=[sync, Say()],
        steps=int(steps),
        bf16=True,
        logging_steps=10**6,
    )
    trainer.train()
    sync.close()
    torch.save(tiny.cast_state(trainer.model), f"{folder}/final.pt")


if __name__ == "__main__":
    main()
