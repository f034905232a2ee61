"""Delta sync for a trainer that already exists, without patching anything."""

from __future__ import annotations

from typing import Any

from transformers import Trainer

from delta_sync.errors import DeltaSyncError
from trl_callback.callback import DeltaSyncCallback
from trl_callback.generation import generation_class

SAMPLING = ("repetition_penalty", "temperature", "top_p", "top_k", "min_p", "max_completion_length")


def attach(trainer: Trainer, uri: str, **settings: Any) -> DeltaSyncCallback:
    """Publish ``trainer``'s weights to ``uri``, and roll out on the server if it is a GRPO or RLOO trainer.

    Such a trainer is to be built with ``use_vllm=False``. The server is the ``server_url`` setting, else the
    trainer's own ``vllm_server_*`` arguments.
    Raises DeltaSyncError if the trainer already has a rollout client of its own.
    """
    callback = DeltaSyncCallback(uri, **settings)
    model, processing_class = trainer.model, trainer.processing_class
    callback.remember(trainer.args, trainer.state, model, processing_class)
    if _rolls_out(trainer):
        _take_over_rollouts(trainer, callback)
    trainer.add_callback(callback)
    callback.watch(trainer)
    return callback


def _rolls_out(trainer: Any) -> bool:
    return hasattr(trainer, "use_vllm") and all(hasattr(trainer, name) for name in SAMPLING)


def _take_over_rollouts(trainer: Any, callback: DeltaSyncCallback) -> None:
    if trainer.use_vllm:
        raise DeltaSyncError(
            f"attach({type(trainer).__name__})",
            expected="a trainer built with use_vllm=False",
            got="use_vllm=True",
            remedy="pass DeltaSyncCallback in callbacks=[…] instead, or build the trainer with use_vllm=False",
        )
    args = trainer.args
    trainer.vllm_generation = generation_class(callback)(
        model=trainer.model,
        accelerator=trainer.accelerator,
        processing_class=trainer.processing_class,
        mode="server",
        structured_outputs_regex=args.vllm_structured_outputs_regex,
        server_base_url=args.vllm_server_base_url,
        server_host=args.vllm_server_host,
        server_port=args.vllm_server_port,
        server_timeout=args.vllm_server_timeout,
        logprobs=0,  # the sampled token's, for the importance-sampling correction
        generation_kwargs=args.generation_kwargs,
        **{name: getattr(trainer, name) for name in SAMPLING},
    )
    trainer.use_vllm, trainer.vllm_mode, trainer._last_loaded_step = True, "server", -1
