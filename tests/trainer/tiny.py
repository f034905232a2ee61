"""Tiny random models, a tokenizer made in memory, and a training nudge, for tests of the trainer's side."""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlamaForCausalLM,
    LlavaConfig,
    LlavaForConditionalGeneration,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

VOCAB = 96
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def llama(*, seed: int = 0, tied: bool = True, layers: int = 2) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(**_COMMON, intermediate_size=48, num_hidden_layers=layers, tie_word_embeddings=tied)
    return LlamaForCausalLM(config)


def qwen3_moe(*, seed: int = 0) -> Qwen3MoeForCausalLM:
    torch.manual_seed(seed)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **_COMMON,
            intermediate_size=48,
            moe_intermediate_size=8,
            num_hidden_layers=2,
            num_experts=4,
            num_experts_per_tok=2,
            head_dim=8,
        )
    )


def mixtral(*, seed: int = 0) -> MixtralForCausalLM:
    torch.manual_seed(seed)
    return MixtralForCausalLM(MixtralConfig(**_COMMON, intermediate_size=16, num_hidden_layers=1, num_local_experts=4))


def llava(*, seed: int = 0) -> LlavaForConditionalGeneration:
    """A vision-language model: checkpoints name its language model otherwise than memory does."""
    torch.manual_seed(seed)
    text = LlamaConfig(**_COMMON, intermediate_size=48, num_hidden_layers=1)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, image_size=8, patch_size=4
    )
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=5))


def tokenizer() -> PreTrainedTokenizerFast:
    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(4, VOCAB))]
    model = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    model.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=model, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def nudge(model: torch.nn.Module, *, seed: int, scale: float = 1e-3) -> None:
    """Move every weight a little, so that some, not all, change once cast to bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            parameter.mul_(1 + scale * noise.to(parameter.dtype))


def cast_state(model: torch.nn.Module, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
    """What a saved checkpoint of the model holds, cast: name -> tensor, by way of save_pretrained's own conversion."""
    from transformers.core_model_loading import revert_weight_conversion

    state = revert_weight_conversion(model, dict(model.state_dict()))
    tied = getattr(model, "all_tied_weights_keys", {}) or {}
    return {name: tensor.detach().to(dtype).clone() for name, tensor in state.items() if name not in tied}
