"""A GRPO run on a tiny checkpoint against a real server; also a program to be killed."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback

from trl_callback import DeltaSyncCallback

PROMPTS = ["w5 w6", "w7 w8 w9", "w10", "w11 w12"]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varies within a group, as sampled completions differ."""
    return [sum(ids) / (512 * len(ids)) for ids in completion_ids]


def trainer_of(
    checkpoint: Path | str,
    url: str,
    sync: DeltaSyncCallback,
    *,
    steps: int,
    more: list | None = None,
    peft_config: Any = None,
    **settings: Any,
) -> Any:
    """float32 masters, bfloat16 autocast, importance-sampling correction on: what a user would run."""
    from trl import GRPOConfig, GRPOTrainer

    arguments = GRPOConfig(
        **{
            "output_dir": str(Path(checkpoint).parent / "out"),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": steps,
            "learning_rate": 3e-4,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": not torch.cuda.is_available(),
            "bf16": True,
            "use_vllm": True,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 120.0,
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "gradient_checkpointing": False,
            "temperature": 1.0,
            **settings,
        }
    )
    return GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32),
        reward_funcs=reward,
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": PROMPTS * 16}),
        processing_class=AutoTokenizer.from_pretrained(checkpoint),
        callbacks=[sync, *(more or [])],
        peft_config=peft_config,
    )


class Say(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        print(f"\nfinished step {state.global_step}", flush=True)


if __name__ == "__main__":
    _, path, server, bucket, count = sys.argv
    trainer_of(path, server, DeltaSyncCallback(bucket, sync_timeout=120.0), steps=int(count), more=[Say()]).train()
