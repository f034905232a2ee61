"""One rank of a DDP run that publishes adapters: argv is JSON with folder, uri and where rank 0 fails, or "nowhere"."""

from __future__ import annotations

import json
import sys
from typing import Any

import grpo
import peft
import tiny
import torch
from end_of_rank import leave_groups

from delta_sync.errors import StoreError
from trl_callback import DeltaSyncCallback
from trl_callback.ranks import is_main


def main() -> None:
    said = json.loads(sys.argv[1])
    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(tiny.llama(), settings)
    sync = DeltaSyncCallback(said["uri"], lora="adapter", serving_dtype="BF16")
    trainer = grpo.plain_trainer(said["folder"], model=model, callbacks=[sync], bf16=True)
    if is_main() and said["fails_at"] == "step":
        original = sync.on_step_end

        def failing(*args: Any, **kwargs: Any) -> None:
            def fail(*_: Any) -> None:
                raise StoreError("injected")

            sync._session._session.step_done = fail  # type: ignore[union-attr]
            original(*args, **kwargs)

        sync.on_step_end = failing  # type: ignore[method-assign]
    if grpo.train_and_say(trainer) and is_main():
        state = peft.get_peft_model_state_dict(model)
        torch.save({name: tensor.to(torch.bfloat16) for name, tensor in state.items()}, f"{said['folder']}/final.pt")
    sync.close()
    leave_groups()


if __name__ == "__main__":
    main()
