"""Seam: the usage object of vLLM's OpenAI routes, which gets one more field."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from vllm_delta_plugin.compat.seam import SeamError, vllm_version, wrap
from vllm_delta_plugin.request_versions import CURRENT

FIELD = "delta_sync"
_HOMES = ("vllm.entrypoints.serve.engine.protocol", "vllm.entrypoints.openai.engine.protocol")  # 0.32, 0.26


def install() -> None:
    """Wrap its making once; SeamError if it is gone or takes no further fields."""
    wrap(_usage_class(), "__init__", _with_versions)


def _usage_class() -> Any:
    for home in _HOMES:
        try:
            found = import_module(home).UsageInfo
        except (ImportError, AttributeError):
            continue
        if found.model_config.get("extra") == "allow":
            return found
    raise SeamError(
        f"vLLM seam {_HOMES[0]}.UsageInfo",
        expected="a model that allows extra fields",
        got=f"none in vLLM {vllm_version()}",
        remedy="use a vLLM release that this plugin's README lists, or upgrade the plugin",
    )


def _with_versions(original: Callable[..., Any]) -> Callable[..., Any]:
    def make(self: Any, /, **data: Any) -> None:
        original(self, **data)
        versions = CURRENT.get()
        usage = versions.to_usage() if versions is not None else None
        if usage is not None:
            setattr(self, FIELD, usage)

    return make
