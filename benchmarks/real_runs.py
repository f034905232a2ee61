"""Real GRPO and SFT runs of SmolLM2-135M by TRL's own trainers, watched at each optimizer step."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from real_deltas import TEXT, Change, Recipe, image, load_model, weights_file
from transformers import AutoTokenizer, TrainerCallback

Keep = Callable[[int, list[Change]], None]


class _Watch(TrainerCallback):
    """Hands each step's changes of the bfloat16 image to ``keep``."""

    def __init__(self, model: torch.nn.Module, keep: Keep) -> None:
        self._model, self._keep, self._old = model, keep, image(model)
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        new = image(self._model)
        steps = [Change(name, self._shapes[name], self._old[name], new[name]) for name in self._shapes]
        self._old = new
        self._keep(state.global_step - 1, steps)


def run(recipe: Recipe, steps: int, keep: Keep) -> None:
    """Train for so many steps by ``recipe``, whose objective is ``grpo`` or ``sft``; float32 computation on CPU."""
    model = load_model()[0].to(getattr(torch, recipe.masters))
    watch = _Watch(model, keep)
    with tempfile.TemporaryDirectory() as folder:
        make = {"grpo": _grpo, "sft": _sft}[recipe.objective]
        make(model, recipe, steps, folder, watch).train()


def _settings(recipe: Recipe, steps: int, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "lr_scheduler_type": "constant",
        "seed": recipe.seed,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


def _sentences() -> list[str]:
    return [part.replace("\n", " ").strip() for part in TEXT.read_text().split("\n\n") if len(part) > 80]


def _grpo(model: Any, recipe: Recipe, steps: int, folder: str, watch: _Watch) -> Any:
    """Completions are rewarded for short words: any reward that differs within a group makes a gradient."""
    from trl import GRPOConfig, GRPOTrainer

    def short_words(completions: list[str], **_: Any) -> list[float]:
        return [text.count(" ") / max(1, len(text)) for text in completions]

    settings = _settings(recipe, steps, folder)
    args = GRPOConfig(**settings, num_generations=4, max_completion_length=24, use_vllm=False)
    rows = Dataset.from_dict({"prompt": [text[:80] for text in _sentences()]})
    return GRPOTrainer(model, short_words, args, train_dataset=rows, processing_class=_tokenizer(), callbacks=[watch])


def _sft(model: Any, recipe: Recipe, steps: int, folder: str, watch: _Watch) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**_settings(recipe, steps, folder), max_length=64)
    rows = Dataset.from_dict({"text": _sentences()})
    return SFTTrainer(model, args, train_dataset=rows, processing_class=_tokenizer(), callbacks=[watch])


def _tokenizer() -> Any:
    gguf = weights_file()
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
