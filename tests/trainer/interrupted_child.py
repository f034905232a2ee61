"""A trainer that ends before its time: argv is folder, uri, what ends it, the settings ``publish_every`` and ``lora``.

Saves the cast weights of every step, or the adapter in PEFT's form. What ends it, in step 4: "exception", "interrupt"
(it waits for Ctrl-C), "torn" (an exception after the weights moved and before the step is over).
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import grpo
import slow_put
import tiny
import torch
from transformers import TrainerCallback

from trl_callback import DeltaSyncCallback


class EndsIn(TrainerCallback):
    """Ends step 4 before its optimizer's step, or within it."""

    def __init__(self, folder: Path, what: str) -> None:
        self.folder, self.what = folder, what

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        weights = adapter_state(model) if hasattr(model, "peft_config") else tiny.cast_state(model)
        torch.save(weights, self.folder / f"step-{state.global_step}.pt")

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < 3:
            return
        if self.what == "exception":
            raise RuntimeError("a reward function failed")
        if self.what == "interrupt":
            print("in step 4", flush=True)
            time.sleep(120)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.what == "torn" and state.global_step == 3:  # the weights have moved, the step is not over
            raise RuntimeError("out of memory")


def adapter_state(model: Any) -> dict[str, torch.Tensor]:
    """The adapter as it is served."""
    import peft

    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {name: tensor.detach().to(torch.bfloat16) for name, tensor in state.items()}


def main() -> None:
    folder, uri, what, every, lora = sys.argv[1:]
    slow_put.install(0.5)
    sync = DeltaSyncCallback(uri, publish_every=int(every), lora=lora)
    ends = EndsIn(Path(folder), what)
    model: Any = tiny.llama()
    if lora == "adapter":
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    grpo.plain_trainer(folder, model=model, callbacks=[sync, ends], steps=10, bf16=True).train()


if __name__ == "__main__":
    main()
