"""A checkpoint in blocks of fp8, as DeepSeek-V3 and Qwen3-FP8 have them, made of a tiny bfloat16 one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import tiny_models
import torch

BLOCK = 128
SETTINGS = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic", "fmt": "e4m3"}
_MAX = torch.finfo(torch.float8_e4m3fn).max


def write(source: Path, folder: Path, values: Mapping[str, torch.Tensor]) -> Path:
    """A folder like ``source`` with the values of ``in_blocks`` and settings that say so."""
    tiny_models.rewrite(source, folder, values)
    described = json.loads((folder / "config.json").read_text())
    left = [n.removesuffix(".weight") for n, v in values.items() if v.ndim == 2 and v.dtype == torch.bfloat16]
    settings = {**SETTINGS, "modules_to_not_convert": left}
    (folder / "config.json").write_text(json.dumps({**described, "quantization_config": settings}))
    return folder


def in_blocks(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The text model's linear layers as float8_e4m3fn with a float32 ``weight_scale_inv`` for each 128 by 128."""
    out: dict[str, torch.Tensor] = {}
    for name, value in values.items():
        if not _is_converted(name, value):
            out[name] = value
            continue
        padded = torch.nn.functional.pad(value.float(), (0, -value.shape[1] % BLOCK, 0, -value.shape[0] % BLOCK))
        blocks = padded.unfold(0, BLOCK, BLOCK).unfold(1, BLOCK, BLOCK)  # [rows, columns, 128, 128]
        scale = blocks.abs().amax((2, 3)).clamp(min=1e-12) / _MAX
        wide = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: value.shape[0], : value.shape[1]]
        out[name] = (value.float() / wide).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn)
        out[f"{name}_scale_inv"] = scale
    return out


def _is_converted(name: str, value: torch.Tensor) -> bool:
    """As the published checkpoints: no embedding, head, router or part that sees, nothing smaller than a block."""
    return value.ndim == 2 and "_proj" in name and "visual." not in name and min(value.shape) >= BLOCK
