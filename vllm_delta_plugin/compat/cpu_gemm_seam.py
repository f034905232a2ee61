"""Seam: where vLLM's CPU platform repacks linear, embedding and head weights (vLLM 0.26 to 0.32)."""

from __future__ import annotations

import functools
from typing import Any

from vllm_delta_plugin.compat import cpu_conv_seam
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.cpu_plain import use_plain_linear

_NAME = "dispatch_cpu_unquantized_gemm"


def install() -> None:
    """Make linear layers read plain weights; layers look the function up at each call. SeamError if it is gone."""
    from vllm.model_executor.layers import utils

    require(utils, _NAME, "cpu_unquantized_gemm")
    original = getattr(utils, _NAME)
    if getattr(original, "__delta_sync_wraps__", False):
        return

    @functools.wraps(original)
    def plain(layer: Any, remove_weight: bool) -> None:
        if layer.weight.ndim == 2:
            use_plain_linear(layer)
        elif not cpu_conv_seam.reads_plain(layer.weight):  # what vLLM repacks is refused by name
            original(layer, remove_weight)

    plain.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    setattr(utils, _NAME, plain)
