"""GRPO and SFT trainers on tiny models, as small as they come."""

from __future__ import annotations

from typing import Any

import tiny
from datasets import Dataset
from transformers import TrainerCallback

PROMPTS = ["w5 w6", "w7 w8 w9", "w10", "w11 w12"]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Varies within a group, as completions differ."""
    return [sum(ids) / (len(ids) * tiny.VOCAB) for ids in completion_ids]


def grpo_arguments(folder: Any, *, url: str | None, use_vllm: bool, **settings: Any) -> Any:
    from trl import GRPOConfig

    return GRPOConfig(
        **{
            "output_dir": str(folder),
            "per_device_train_batch_size": 4,
            "num_generations": 4,
            "max_completion_length": 6,
            "max_steps": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "bf16": True,
            "use_vllm": use_vllm,
            "vllm_mode": "server",
            "vllm_server_base_url": url,
            "vllm_server_timeout": 10.0,
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            "gradient_checkpointing": False,
            **settings,
        }
    )


def grpo_trainer(folder: Any, *, model: Any, url: str | None, use_vllm: bool, callbacks: list | None = None,
                 rollout_func: Any = None, peft_config: Any = None, given: dict | None = None,
                 **settings: Any) -> Any:  # fmt: skip
    from trl import GRPOTrainer

    return GRPOTrainer(
        **{
            "model": model,
            "reward_funcs": reward,
            "args": grpo_arguments(folder, url=url, use_vllm=use_vllm, **settings),
            "train_dataset": Dataset.from_dict({"prompt": PROMPTS * 4}),
            "processing_class": tiny.tokenizer(),
            "callbacks": callbacks,
            "peft_config": peft_config,
            **({"rollout_func": rollout_func} if rollout_func else {}),
            **(given or {}),
        }
    )


class AheadFirst(TrainerCallback):
    """Holds every optimizer step until the batch that runs ahead is there: it then comes from the weights before."""

    def __init__(self, sync: Any) -> None:
        self.sync = sync

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        running = self.sync._ahead._running
        if running is not None:
            running.wait()


def plain_trainer(folder: Any, *, model: Any, callbacks: list, steps: int = 3, **settings: Any) -> Any:
    """transformers' own Trainer on a language-modelling batch."""
    import torch
    from transformers import Trainer, TrainingArguments

    rows = [{"input_ids": torch.tensor(r), "labels": torch.tensor(r)} for r in [[5, 6, 7, 8], [9, 10, 11, 12]] * 8]
    arguments = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": steps,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-3,
            "logging_steps": 1,
            "report_to": [],
            "use_cpu": True,
            "save_strategy": "no",
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
            **settings,
        }
    )
    return Trainer(model=model, args=arguments, train_dataset=rows, callbacks=callbacks)


def train_and_say(trainer: Any) -> bool:
    """Train one rank of several and print how that ended, as the tests that started it read; whether it trained."""
    from delta_sync.errors import DeltaSyncError

    rank = trainer.args.process_index
    try:
        trainer.train()
    except DeltaSyncError as error:
        print(f"rank {rank} raised {type(error).__name__}: {error}", flush=True)
        return False
    print(f"rank {rank} trained {trainer.state.global_step}", flush=True)
    return True
