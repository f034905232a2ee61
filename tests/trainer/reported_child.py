"""A training process that reports to every tracker; argv is {"folder", "uri"} in JSON. One of several if so started."""

from __future__ import annotations

import json
import os
import sys

import grpo
import tiny

from trl_callback import DeltaSyncCallback

SHARDED = "WORLD_SIZE" in os.environ
if SHARDED:
    import accelerate_on_cpu  # noqa: F401


def main() -> None:
    said = json.loads(sys.argv[1])
    sync = DeltaSyncCallback(said["uri"])
    reporters = ["tensorboard", "wandb", "trackio"]
    trainer = grpo.plain_trainer(
        said["folder"], model=tiny.llama(), callbacks=[sync], bf16=True, report_to=reporters, run_name="tiny"
    )
    trainer.train()
    sync.close()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(json.dumps(logged), flush=True)


if __name__ == "__main__":
    main()
