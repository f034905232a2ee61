"""Seam: which kernels of latent attention vLLM takes on a CPU (a choice since 0.32).

Where a CPU has AMX it prefers kernels that read packed copies of ``kv_b_proj``, whose weight it lets go of. Those take
no deltas; its other ones, which every CPU has, read the weight and what can be made of it in place.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

from vllm_delta_plugin.compat.seam import wrap
from vllm_delta_plugin.compat.settings_seam import setting
from vllm_delta_plugin.flag import WORKER_EXTENSION
from vllm_delta_plugin.log import logger


def install() -> None:
    """Choose for servers that follow a run and did not choose themselves; SeamError if this vLLM has no such place."""
    platform = sys.modules.get("vllm.platforms.cpu")  # there before any config is made, and on a CPU only
    if platform is not None:
        wrap(platform.CpuPlatform, "check_and_update_config", _choosing)


def _choosing(original: Callable[..., Any]) -> Callable[..., Any]:
    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        if _reads_latent(vllm_config) and (plain := _plain()) and vllm_config.attention_config.backend is None:
            vllm_config.attention_config.backend = plain
            logger.info("delta sync: attention backend %s, whose weights take deltas", plain.name)
        original(cls, vllm_config)

    return check_and_update_config


def _plain() -> Any:
    """The kernels to choose, None where vLLM knows no others."""
    try:
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
    except ImportError:
        return None
    return AttentionBackendEnum.CPU_MLA if hasattr(AttentionBackendEnum, "AMX_MLA") else None


def _reads_latent(vllm_config: Any) -> bool:
    # Where the first is gone the workers don't take calls either, and the start fails.
    followed = getattr(vllm_config.parallel_config, "worker_extension_cls", "") == WORKER_EXTENSION
    return followed and vllm_config.model_config is not None and bool(setting(vllm_config, "model_config.use_mla"))
