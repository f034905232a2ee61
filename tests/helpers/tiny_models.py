"""Tiny random checkpoints that vLLM and transformers load like real ones, with a word-level tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

VOCAB = 512
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.1,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def build(path: Path, architecture: str = "qwen3", seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Write a checkpoint folder for qwen3 (tied), llama (untied), qwen3_moe or mixtral; returns ``path``."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(architecture), dtype=dtype)
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def config(architecture: str) -> Any:
    """The transformers config of a tiny model."""
    import transformers as t

    if architecture == "qwen3":
        return t.Qwen3Config(**COMMON, head_dim=32, tie_word_embeddings=True)
    if architecture == "llama":
        return t.LlamaConfig(**COMMON, head_dim=32, tie_word_embeddings=False)
    if architecture == "qwen3_moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
        return t.Qwen3MoeConfig(**COMMON, head_dim=32, tie_word_embeddings=False, **experts)
    if architecture == "mixtral":
        return t.MixtralConfig(**COMMON, head_dim=32, num_local_experts=4, num_experts_per_tok=2)
    raise ValueError(f"no tiny model of architecture {architecture!r}")


def write_tokenizer(path: Path, vocab: int = VOCAB, special: Mapping[str, int] | None = None) -> None:
    """One word per token: "w5" is token 5, unless ``special`` names it."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3, **{f"w{i}": i for i in range(4, vocab)}}
    named = special or {}
    vocabulary = {word: i for word, i in vocabulary.items() if i not in named.values()} | dict(named)
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, additional_special_tokens=list(named), **names)
    fast.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    fast.save_pretrained(path)
