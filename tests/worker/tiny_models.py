"""Tiny random checkpoints, written so that every mistake in the map would show."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from helpers.tiny_models import config
from safetensors.torch import load_file, save_file

KINDS = ("qwen3", "llama", "qwen3_moe", "qwen3_moe_fused", "mixtral")
_VOCAB = 500  # not a multiple of vLLM's padding


def make(kind: str, folder: Path, seed: int = 0, **changes: object) -> Path:
    """Write a random bfloat16 checkpoint of a model family, with other config settings if given; its folder."""
    from transformers import AutoModelForCausalLM

    settings = config(kind.removesuffix("_fused"))
    for name, value in {"vocab_size": _VOCAB, **changes}.items():
        setattr(settings, name, value)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(settings, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are all ones at first: no permutation of them would be seen
            parameter.add_(torch.randn(parameter.shape).to(torch.bfloat16) * 0.05)
    model.save_pretrained(folder)
    if kind.endswith("_fused"):
        save(folder, _fused(tensors(folder), settings.num_hidden_layers, settings.num_experts))
    return folder


def _fused(values: Mapping[str, torch.Tensor], layers: int, experts: int) -> dict[str, torch.Tensor]:
    """Experts as transformers 5 holds them: gate_up_proj ``[E, 2I, H]`` and down_proj ``[E, H, I]``."""
    out = {name: value for name, value in values.items() if ".experts." not in name}
    for layer in range(layers):
        prefix = f"model.layers.{layer}.mlp.experts"
        each = [
            {part: values[f"{prefix}.{e}.{part}_proj.weight"] for part in ("gate", "up", "down")}
            for e in range(experts)
        ]
        out[f"{prefix}.gate_up_proj"] = torch.stack([torch.cat([e["gate"], e["up"]]) for e in each])
        out[f"{prefix}.down_proj"] = torch.stack([e["down"] for e in each])
    return out


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    return load_file(folder / "model.safetensors")


def save(folder: Path, values: Mapping[str, torch.Tensor]) -> None:
    """Write a checkpoint's tensors."""
    save_file({n: v.contiguous() for n, v in values.items()}, folder / "model.safetensors", {"format": "pt"})


def rewrite(source: Path, folder: Path, values: Mapping[str, torch.Tensor]) -> Path:
    """Copy a checkpoint folder with other values."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save(folder, values)
    return folder
