"""Tiny random checkpoints, made from configs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, Qwen3Config, Qwen3MoeConfig

_COMMON = {
    "vocab_size": 500,  # not a multiple of vLLM's padding
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CONFIGS = {
    "qwen3": lambda: Qwen3Config(**_COMMON, head_dim=32, tie_word_embeddings=True),
    "llama": lambda: LlamaConfig(**_COMMON, head_dim=32, tie_word_embeddings=False),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON,
        head_dim=32,
        tie_word_embeddings=False,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "mixtral": lambda: MixtralConfig(**_COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2),
}


def make(kind: str, folder: Path, seed: int = 0) -> Path:
    """Write a random bfloat16 checkpoint of a model family and return its folder."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(CONFIGS[kind]()).to(torch.bfloat16)
    with torch.no_grad():
        for parameter in model.parameters():  # norms are all ones at first: no permutation of them would be seen
            parameter.add_(torch.randn(parameter.shape).to(torch.bfloat16) * 0.05)
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint folder."""
    return load_file(folder / "model.safetensors")


def rewrite(source: Path, folder: Path, values: Mapping[str, torch.Tensor]) -> Path:
    """Copy a checkpoint folder with other values."""
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    save_file(
        {name: value.contiguous() for name, value in values.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    return folder
