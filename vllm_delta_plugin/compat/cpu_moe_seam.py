"""Seam: where vLLM's CPU platform repacks experts, and the kernel that reads them (vLLM 0.26 to 0.32)."""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import Any

import torch

from vllm_delta_plugin.compat.seam import SeamError, require, vllm_version
from vllm_delta_plugin.cpu_plain import keep_expert_weight, plain_fused_moe

_LAYERS = "vllm.model_executor.layers.fused_moe"
_MODULES = (f"{_LAYERS}.cpu_fused_moe", f"{_LAYERS}.experts.cpu_moe")  # up to 0.27; since 0.28


def install() -> None:
    """Make experts stay plain and be read plain; SeamError if this vLLM has no such functions."""
    module = _module()
    takes_out = "out" in inspect.signature(module.cpu_fused_moe).parameters  # since 0.30
    module.cpu_prepack_moe_weight = keep_expert_weight  # type: ignore[attr-defined]
    module.cpu_fused_moe = _into if takes_out else _returning  # type: ignore[attr-defined]


def _module() -> ModuleType:
    for name in _MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError:
            continue
        if hasattr(module, "cpu_fused_moe"):
            require(module, "cpu_prepack_moe_weight")
            return module
    raise SeamError(
        f"vLLM seam {' or '.join(_MODULES)}", expected="cpu_fused_moe", got=f"none in vLLM {vllm_version()}"
    )


def _into(
    out: Any,
    x: Any,
    w13: Any,
    w2: Any,
    b13: Any,
    b2: Any,
    weights: Any,
    ids: Any,
    act: str,
    isa: str,
    skip: bool = False,
) -> None:
    plain_fused_moe(out, x, w13, w2, b13, b2, weights, ids, act, skip)


def _returning(
    x: Any, w13: Any, w2: Any, b13: Any, b2: Any, weights: Any, ids: Any, act: str, isa: str, skip: bool = False
) -> torch.Tensor:
    out = torch.empty_like(x)
    plain_fused_moe(out, x, w13, w2, b13, b2, weights, ids, act, skip)
    return out
