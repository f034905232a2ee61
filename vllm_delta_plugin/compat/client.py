"""Seam: the async engine client in an API server process, through which a route asks the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from vllm_delta_plugin.compat.seam import require


async def ask_engines(engine_client: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Every engine's answer to a utility method, in engine order; TimeoutError after ``timeout`` seconds."""
    return await asyncio.wait_for(asyncio.gather(*_calls(engine_client, method, *args)), timeout)


async def ask_each(engine_client: Any, method: str, *, timeout: float) -> list[Any]:
    """The same, with the exception in place of the answer of an engine that failed or took too long."""
    calls = [asyncio.wait_for(call, timeout) for call in _calls(engine_client, method)]
    return await asyncio.gather(*calls, return_exceptions=True)


def _calls(engine_client: Any, method: str, *args: Any) -> list[Coroutine[Any, Any, Any]]:
    require(engine_client, "engine_core")
    core = engine_client.engine_core
    engines = getattr(core, "core_engines", None)
    if engines is not None and len(engines) > 1:
        require(core, "_call_utility_async")
        return [core._call_utility_async(method, *args, engine=engine) for engine in engines]
    require(core, "call_utility_async")
    return [core.call_utility_async(method, *args)]
