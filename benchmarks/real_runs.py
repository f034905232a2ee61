"""Real GRPO and SFT runs of SmolLM2-135M by TRL's own trainers, watched at each optimizer step."""

from __future__ import annotations

import copy
import functools
import tempfile
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from real_deltas import TEXT, Change, Recipe, image, load_model, weights_file
from transformers import AutoTokenizer, PrinterCallback, TrainerCallback

Keep = Callable[[int, list[Change]], None]


@dataclass(frozen=True)
class Setup:
    """What a recipe runs on: small enough for two cores, unless told otherwise.

    batch: sequences a step. group, tokens: GRPO's completions of a prompt, and their length. length: SFT's.
    text: ``license``, or ``python``, the prose about the language that CPython installs (460 kB). gguf: the weights,
    by default the installed package's. seconds: after which no further step is made.
    """

    device: str = "cpu"
    batch: int = 4
    group: int = 4
    tokens: int = 24
    length: int = 64
    text: str = "license"
    gguf: Path | None = None
    seconds: float = float("inf")


def compute_type(recipe: Recipe, setup: Setup) -> str:
    """What the model computes in: autocast to bfloat16 over float32 masters on a GPU, else the masters' own type."""
    return recipe.masters if setup.device == "cpu" else "bfloat16"


class _Watch(TrainerCallback):
    """Hands the changes of the bfloat16 image in each step that is ``wanted``, or in all, to ``keep``."""

    def __init__(self, model: torch.nn.Module, keep: Keep, wanted: Collection[int] | None, seconds: float) -> None:
        self._model, self._keep, self._wanted = model, keep, wanted
        self._end = time.monotonic() + seconds
        self._shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
        self._old = image(model) if self._is_wanted(0) else {}

    def _is_wanted(self, step: int) -> bool:
        return self._wanted is None or step in self._wanted

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        step = state.global_step - 1
        now, next_ = self._is_wanted(step), self._is_wanted(step + 1)
        new = image(self._model) if now or next_ else {}
        if now:
            self._keep(step, [Change(name, self._shapes[name], self._old[name], new[name]) for name in self._shapes])
        self._old = new
        control.should_training_stop = control.should_training_stop or time.monotonic() > self._end


def run(
    recipe: Recipe, steps: int, keep: Keep, setup: Setup | None = None, wanted: Collection[int] | None = None
) -> int:
    """Train for so many steps by ``recipe``, whose objective is ``grpo`` or ``sft``; the number of steps made.

    ``keep`` gets the changes of each step, counted from 0, or of those ``wanted``: looking costs a copy of the model.
    """
    setup = setup or Setup()
    model = copy.deepcopy(_loaded(setup.gguf)).to(setup.device, getattr(torch, recipe.masters))
    watch = _Watch(model, keep, wanted, setup.seconds)
    with tempfile.TemporaryDirectory() as folder:
        make = {"grpo": _grpo, "sft": _sft}[recipe.objective]
        trainer = make(model, recipe, setup, _settings(recipe, setup, steps, folder), watch)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
        return int(trainer.state.global_step)


@functools.cache
def _loaded(gguf: Path | None) -> torch.nn.Module:
    return load_model(gguf)[0]


def _settings(recipe: Recipe, setup: Setup, steps: int, folder: str) -> dict[str, Any]:
    return {
        "output_dir": folder,
        "max_steps": steps,
        "learning_rate": recipe.lr,
        "weight_decay": recipe.weight_decay,
        "lr_scheduler_type": "constant",
        "seed": recipe.seed,
        "per_device_train_batch_size": setup.batch,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": setup.device == "cpu",
        "bf16": setup.device != "cpu" and recipe.masters == "float32",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }


def _sentences(text: str) -> list[str]:
    if text == "license":
        whole = TEXT.read_text()
    else:
        from pydoc_data.topics import topics

        whole = "\n\n".join(topics[name] for name in sorted(topics))
    return [part.replace("\n", " ").strip() for part in whole.split("\n\n") if len(part) > 80]


def _grpo(model: Any, recipe: Recipe, setup: Setup, settings: dict[str, Any], watch: _Watch) -> Any:
    """Completions are rewarded for short words: any reward that differs within a group makes a gradient."""
    from trl import GRPOConfig, GRPOTrainer

    def short_words(completions: list[str], **_: Any) -> list[float]:
        return [text.count(" ") / max(1, len(text)) for text in completions]

    args = GRPOConfig(**settings, num_generations=setup.group, max_completion_length=setup.tokens, use_vllm=False)
    rows = Dataset.from_dict({"prompt": [text[:80] for text in _sentences(setup.text)]})
    tokenizer = _tokenizer(setup)
    return GRPOTrainer(model, short_words, args, train_dataset=rows, processing_class=tokenizer, callbacks=[watch])


def _sft(model: Any, recipe: Recipe, setup: Setup, settings: dict[str, Any], watch: _Watch) -> Any:
    from trl import SFTConfig, SFTTrainer

    args = SFTConfig(**settings, max_length=setup.length)
    rows = Dataset.from_dict({"text": _sentences(setup.text)})
    return SFTTrainer(model, args, train_dataset=rows, processing_class=_tokenizer(setup), callbacks=[watch])


def _tokenizer(setup: Setup) -> Any:
    gguf = setup.gguf or weights_file()
    return AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
