"""Seam: EngineArgs.add_cli_args and EngineArgs.from_cli_args, where flags are declared and turned into arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_delta_plugin import flag
from vllm_delta_plugin.compat.seam import require, require_fields, wrap


def install() -> None:
    """Wrap both once; SeamError if either is gone."""
    from vllm.engine.arg_utils import EngineArgs

    require(EngineArgs, "logprobs_mode", "worker_extension_cls")
    require_fields(EngineArgs, "additional_config", "data_parallel_backend")
    default = EngineArgs.logprobs_mode
    wrap(EngineArgs, "add_cli_args", _declare)
    wrap(EngineArgs, "from_cli_args", lambda original: _apply(original, default))


def _declare(original: Callable[..., Any]) -> Callable[..., Any]:
    def add_cli_args(parser: Any, *args: Any, **kwargs: Any) -> Any:
        parser = original(parser, *args, **kwargs)
        flag.add_arguments(parser)
        return parser

    return add_cli_args


def _apply(original: Callable[..., Any], default: str) -> Callable[..., Any]:
    def from_cli_args(cls: type, args: Any, *rest: Any, **kwargs: Any) -> Any:
        flag.apply_flag(args, default)
        return original(cls, args, *rest, **kwargs)

    return from_cli_args
