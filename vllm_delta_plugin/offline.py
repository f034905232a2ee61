"""Waiting for a version with an ``LLM`` object, whichever way it runs its engine."""

from __future__ import annotations

import time
from typing import Any

from delta_sync.errors import MappingError, SyncTimeoutError
from vllm_delta_plugin.compat.client import ask_blocking

_PATIENCE = 30.0  # seconds beyond its time-out for an engine that is busy, or whose coordinator does not answer
_PAUSE = 0.005  # seconds between two looks at an in-process engine's queue


def sync(llm: Any, version: int | None, timeout: float) -> dict[str, Any]:
    """See vllm_delta_plugin.sync."""
    client = llm.llm_engine.engine_core
    core = getattr(client, "engine_core", None)
    status = _ask(client, version, timeout) if core is None else _pump(core, version, timeout)
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


def _ask(client: Any, version: int | None, timeout: float) -> dict[str, Any] | None:
    try:
        status: dict[str, Any] | None = ask_blocking(
            client, "delta_sync_wait", version, timeout, timeout=timeout + _PATIENCE
        )
    except TimeoutError:
        raise _silent("the engine", timeout) from None
    return status


def _silent(who: str, timeout: float) -> SyncTimeoutError:
    return SyncTimeoutError(f"{who}'s answer", expected=f"within {timeout + _PATIENCE:g} s", got="none")


def _pump(core: Any, version: int | None, timeout: float) -> dict[str, Any] | None:
    future = core.delta_sync_wait(version, timeout)
    if future is None:
        return None
    deadline = time.monotonic() + timeout + _PATIENCE
    while not future.done():
        core.delta_sync_pump()
        time.sleep(_PAUSE)
        if time.monotonic() > deadline:
            raise _silent("the coordinator", timeout)
    result: dict[str, Any] = future.result()
    return result
