"""One rank of a two-process DDP run: argv is folder, uri, and where rank 0's publishing is to fail, or "nowhere"."""

from __future__ import annotations

import sys
from typing import Any

import grpo
import tiny
from end_of_rank import leave_groups

from delta_sync.errors import StoreError
from trl_callback import DeltaSyncCallback
from trl_callback.ranks import is_main


def main() -> None:
    folder, uri, fails_at = sys.argv[1:]
    sync = DeltaSyncCallback(uri)
    trainer = grpo.plain_trainer(folder, model=tiny.llama(), callbacks=[sync], bf16=True)
    if is_main() and fails_at == "step":
        original = sync.on_step_end

        def fail_once(*args: Any, **kwargs: Any) -> None:
            sync._session._lead.wants = lambda step: (_ for _ in ()).throw(StoreError("injected"))  # type: ignore
            original(*args, **kwargs)

        sync.on_step_end = fail_once  # type: ignore[method-assign]
    if grpo.train_and_say(trainer) and is_main():
        import torch

        torch.save(tiny.cast_state(trainer.model), f"{folder}/final.pt")
    sync.close()
    leave_groups()


if __name__ == "__main__":
    main()
