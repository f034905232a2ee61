"""vLLM side of delta weight sync: one flag, a poller inside the EngineCore, commits between two scheduler steps."""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["register", "sync"]


def register() -> None:
    """Hook into whichever parts of vLLM this process has loaded; called by vLLM in every process, often twice.

    Raises SeamError, naming the seam, if this vLLM no longer has a place the plugin needs.
    """
    from vllm_delta_plugin.compat import cpu_mla_seam, kernel_scan

    kernel_scan.install()
    cpu_mla_seam.install()
    if "vllm.engine.arg_utils" in sys.modules:
        from vllm_delta_plugin.compat import cli

        cli.install()
    # Every process that will build an EngineCore has this module loaded before vLLM loads its plugins.
    if "vllm.v1.engine.core" in sys.modules:
        from vllm_delta_plugin.compat import engine_core, prefix_cache

        engine_core.install()
        prefix_cache.install()


def sync(llm: Any, version: int | None = None, timeout: float = 60.0) -> dict[str, Any]:
    """Block until an ``LLM`` serves ``version`` (default: the newest published one) and return its status.

    Raises SyncTimeoutError at the deadline (seconds), naming the refusal or the last error, and vLLM's EngineDeadError
    if the engine dies.
    """
    from vllm_delta_plugin.offline import sync as run

    return run(llm, version, timeout)
