"""Seam: what encoders made of images and sounds, which scheduler and workers keep for other requests too.

Under ``identifier`` alone, so ``cache_salt.py`` gives each generation of weights names of its own. A worker learns a
name once, with the request's first batch: from then on the request keeps it, also where it is preempted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_delta_plugin.compat.seam import require, require_fields
from vllm_delta_plugin.main_thread import EngineBroken


def install() -> None:
    """Look whether the places are there; SeamError if not."""
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.core.encoder_cache_manager import EncoderCacheManager
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.executor.abstract import Executor

    require_fields(MultiModalFeatureSpec, "identifier", "mm_hash")
    require(EncoderCacheManager, "free", "check_and_update_cache")
    require(Scheduler, "reset_encoder_cache")
    require(Executor, "reset_encoder_cache")


def releasing(scheduler: Any) -> Callable[[Any], None] | None:
    """What gives back a request's holds; None for encoder-decoder models, which keep nothing for other requests."""
    return None if scheduler.is_encoder_decoder else scheduler.encoder_cache_manager.free


def reset(core: Any) -> None:
    """Forget all of it; on the engine's thread, once all that ran are preempted and so begin their prefill anew.

    Not by EngineCore.reset_encoder_cache, which warns whenever requests wait. EngineBroken if a worker can't.
    """
    core.scheduler.reset_encoder_cache()
    try:
        core.model_executor.reset_encoder_cache()
    except Exception as error:
        raise EngineBroken(f"delta sync: a worker could not forget encoded images: {error!r}") from error
