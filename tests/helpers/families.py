"""Model families that vLLM serves and TRL users train, each as a tiny config of its own transformers class."""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch

from helpers import vision_files
from helpers.tiny_models import COMMON

_VOCAB = 500  # not a multiple of vLLM's padding
_TEXT: dict[str, Any] = COMMON | {"vocab_size": _VOCAB}
_HEAD = {"head_dim": 32}
_UNTIED = {"tie_word_embeddings": False}
_MLA = {
    "kv_lora_rank": 512,  # with the rope part 576: the only size of vLLM's CPU kernel for this attention
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,  # as DeepSeek's own: a GPU's kernels take few other sizes
    "v_head_dim": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
}
_GROUPS = {"n_group": 2, "topk_group": 1, "topk_method": "group_limited_greedy", "scoring_func": "softmax"}
_SIGMOID = {**_GROUPS, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
_GATED_DELTA = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
_VISION = {
    "depth": 2,
    "num_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "patch_size": vision_files.PATCH,
}
_LEARNED_PLACES = {"num_position_embeddings": 16}
_WIDE = {  # every part of a fused matrix a multiple of 128, and of what is fp8 online of 16
    "hidden_size": 256,
    "intermediate_size": 512,
    "intermediate_size_mlp": 512,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "num_attention_heads": 8,
    "num_experts": 16,
    "linear_num_value_heads": 8,
    "n_inner": 512,
    "q_lora_rank": 128,
}


@dataclass(frozen=True)
class Family:
    """How to make one family's tiny model; ``settings`` override the common ones, ``serve`` are engine options."""

    name: str
    config_class: str
    settings: dict[str, Any] = field(default_factory=dict)
    serve: dict[str, Any] = field(default_factory=dict)
    model_class: str = "AutoModelForCausalLM"
    vision: dict[str, Any] | None = None  # settings of the part that sees images; the others then are the text part's
    torchvision: bool = False  # whether vLLM imports it for the family

    @property
    def experts(self) -> bool:
        """Whether it is a mixture of experts."""
        return any("experts" in setting for setting in self.settings)

    def config(self, wide: bool = False) -> Any:
        """The transformers config; ``wide``: of sizes that fp8 can have on every device."""
        import transformers

        settings = _TEXT | self.settings
        if wide:
            settings |= {name: size for name, size in _WIDE.items() if settings.get(name)}
            settings["num_key_value_heads"] *= 2
        if self.vision is not None:
            tied = settings.get("tie_word_embeddings", False)
            seen = _VISION | {"out_hidden_size": settings["hidden_size"]} | self.vision
            parts = {"text_config": settings, "vision_config": seen}
            settings = {**parts, **vision_files.TOKEN_IDS, "tie_word_embeddings": tied}
        return getattr(transformers, self.config_class)(**settings)

    def make(self, folder: Path, wide: bool = False) -> Path:
        """Write a random bfloat16 checkpoint, always the same; its folder."""
        return Path(shutil.copytree(_made(self.name)[wide], folder))

    def write(self, folder: Path, wide: bool = False) -> None:
        """Make that checkpoint, which transformers cannot once vLLM has served the family with its classes."""
        import transformers

        torch.manual_seed(0)
        config = self.config(wide)
        config.dtype = torch.bfloat16
        create = getattr(transformers, self.model_class)
        create = getattr(create, "from_config", None) or create._from_config
        model = create(config, dtype=torch.bfloat16)
        for buffer in _learned(model):
            buffer.data = buffer.data.float()  # as its checkpoints have it
        with torch.no_grad():
            for parameter in [*model.parameters(), *_learned(model)]:  # constants would hide a permutation
                parameter.add_(torch.randn(parameter.shape).to(parameter.dtype) * 0.05)
        model.save_pretrained(folder)
        if self.vision is not None:
            videos = "Qwen2VLVideoProcessor" if self.name == "Qwen2.5-VL" else "Qwen3VLVideoProcessor"
            vision_files.write(folder, _VOCAB, videos)


@cache
def _made(name: str) -> tuple[Path, Path]:
    """A family's checkpoints, the wide one second, made once in a process and before vLLM serves either."""
    parent = Path(tempfile.mkdtemp(prefix="family-"))
    atexit.register(shutil.rmtree, parent, ignore_errors=True)
    folders = parent / "small", parent / "wide"
    for wide, folder in enumerate(folders):
        FAMILIES[name].write(folder, bool(wide))
    return folders


def as_served(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors as a trainer publishes them: in float32 what vLLM holds so, whatever the file has."""
    return {name: value.float() if name.endswith(_FLOAT32) else value for name, value in values.items()}


def _learned(model: torch.nn.Module) -> list[torch.Tensor]:
    """Buffers that a checkpoint has: DeepSeek-V3's correction of router scores."""
    saved = model.state_dict().keys()
    return [buffer for name, buffer in model.named_buffers() if name in saved]


_FLOAT32 = ("A_log", "e_score_correction_bias")
_ROPE_3D = {"rope_type": "default", "mrope_section": [4, 6, 6], "rope_theta": 10000.0}
_ROPE_3D_QUARTER = {**_ROPE_3D, "mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.25}
_SEEING: dict[str, Any] = {
    "torchvision": True,
    "serve": {"skip_tokenizer_init": False, "limit_mm_per_prompt": {"image": 1, "video": 0}},
}

FAMILIES = {
    family.name: family
    for family in (
        Family("Qwen2", "Qwen2Config", {"tie_word_embeddings": True}),
        Family("Qwen2.5", "Qwen2Config", {**_UNTIED, "rope_theta": 1e6}),
        Family("Qwen3", "Qwen3Config", {**_HEAD, "tie_word_embeddings": True}),
        Family("Qwen2-MoE", "Qwen2MoeConfig", {**_MOE, **_UNTIED, "shared_expert_intermediate_size": 64}),
        Family("Qwen3-MoE", "Qwen3MoeConfig", {**_HEAD, **_MOE, **_UNTIED}),
        Family(
            "Qwen3-Next", "Qwen3NextConfig", {**_HEAD, **_MOE, **_GATED_DELTA, "shared_expert_intermediate_size": 64}
        ),
        Family("Qwen3.5, its text model", "Qwen3_5TextConfig", {**_HEAD, **_GATED_DELTA}, torchvision=True),
        Family(
            "Qwen3.5",
            "Qwen3_5Config",
            {**_HEAD, **_GATED_DELTA, "rope_parameters": _ROPE_3D_QUARTER},
            model_class="Qwen3_5ForConditionalGeneration",
            vision=_LEARNED_PLACES,
            **_SEEING,
        ),
        Family(
            "Qwen3.5-MoE",
            "Qwen3_5MoeConfig",
            {
                **_HEAD,
                **_MOE,
                **_GATED_DELTA,
                "shared_expert_intermediate_size": 64,
                "rope_parameters": _ROPE_3D_QUARTER,
            },
            model_class="Qwen3_5MoeForConditionalGeneration",
            vision=_LEARNED_PLACES,
            **_SEEING,
        ),
        Family("Llama 3", "LlamaConfig", {**_HEAD, **_UNTIED}),
        Family(
            "Llama 4",
            "Llama4TextConfig",
            {
                **_HEAD,
                "intermediate_size_mlp": 256,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "interleave_moe_layer_step": 2,
            },
        ),
        Family("Gemma 2", "Gemma2Config", {**_HEAD, "query_pre_attn_scalar": 32}),
        Family("Gemma 3", "Gemma3TextConfig", {**_HEAD, "query_pre_attn_scalar": 32}),
        Family("Mistral", "MistralConfig", _HEAD),
        Family("Mixtral", "MixtralConfig", {**_HEAD, "num_local_experts": 4}),
        Family("Phi-3", "Phi3Config"),
        Family("Phi-2", "PhiConfig", {"num_key_value_heads": 4, "n_inner": 256}),  # as vLLM 0.26 calls the inner size
        Family("SmolLM3", "SmolLM3Config", {"tie_word_embeddings": True}),
        Family("OLMo 2", "Olmo2Config"),
        Family("GPT-OSS", "GptOssConfig", {**_HEAD, "num_local_experts": 4, "num_experts_per_tok": 2}),
        Family("DeepSeek-V2", "DeepseekV2Config", {**_MLA, **_GROUPS, "q_lora_rank": None}),
        Family("DeepSeek-V3", "DeepseekV3Config", {**_MLA, **_SIGMOID, "q_lora_rank": 64}),
        Family("Granite", "GraniteConfig"),
        Family("Granite-MoE", "GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        Family(
            "Qwen2.5-VL",
            "Qwen2_5_VLConfig",
            {"rope_parameters": _ROPE_3D},
            model_class="Qwen2_5_VLForConditionalGeneration",
            vision={"fullatt_block_indexes": [1], "window_size": vision_files.SIDE},
            **_SEEING,
        ),
        Family(
            "Qwen3-VL",
            "Qwen3VLConfig",
            {**_HEAD, "rope_parameters": _ROPE_3D},
            model_class="Qwen3VLForConditionalGeneration",
            vision={**_LEARNED_PLACES, "deepstack_visual_indexes": [0]},
            **_SEEING,
        ),
    )
}
