"""Waiting for a version with an ``LLM`` object, whichever way it runs its engine."""

from __future__ import annotations

import time
from typing import Any

from delta_sync.errors import MappingError, SyncTimeoutError

_PAUSE = 0.005  # seconds between two looks at an in-process engine's queue


def sync(llm: Any, version: int | None, timeout: float) -> dict[str, Any]:
    """See vllm_delta_plugin.sync."""
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    status = client.call_utility("delta_sync_wait", version, timeout) if core is None else _pump(core, version, timeout)
    if status is None:
        raise MappingError(
            "this LLM",
            expected="one that follows a run",
            got="one without delta_sync config",
            remedy='pass worker_extension_cls and additional_config={"delta_sync": {"uri": …}}',
        )
    if not status.pop("reached"):
        reason = status["refusal"] or status["last_error"] or "nothing went wrong, it was only slow"
        raise SyncTimeoutError(
            f"version {status['wanted_version']}", expected=f"served within {timeout:g} s", got=f"{reason}"
        )
    return status


def _pump(core: Any, version: int | None, timeout: float) -> dict[str, Any] | None:
    future = core.delta_sync_wait(version, timeout)
    if future is None:
        return None
    deadline = time.monotonic() + timeout + 30.0  # the coordinator ends it at ``timeout``; this is for a dead thread
    while not future.done():
        core.delta_sync_pump()
        time.sleep(_PAUSE)
        if time.monotonic() > deadline:
            raise SyncTimeoutError("the coordinator's answer", expected=f"within {timeout + 30:g} s", got="none")
    result: dict[str, Any] = future.result()
    return result
