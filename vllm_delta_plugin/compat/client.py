"""Seam: the async engine client in an API server process, through which a route asks the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from vllm_delta_plugin.compat.seam import require


def count_engines(engine_client: Any) -> int:
    """How many engines there are to ask."""
    return len(_engines(engine_client))


async def ask_engines(engine_client: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Every engine's answer to a utility method, in engine order; TimeoutError after ``timeout`` seconds."""
    calls = [call(method, *args) for call in _engines(engine_client)]
    return await asyncio.wait_for(asyncio.gather(*calls), timeout)


async def ask_one(engine_client: Any, index: int, method: str, *args: Any, timeout: float) -> Any:
    """One engine's answer, IndexError if there is no such engine; TimeoutError after ``timeout`` seconds."""
    return await asyncio.wait_for(_engines(engine_client)[index](method, *args), timeout)


async def ask_each(engine_client: Any, method: str, *, timeout: float) -> list[Any]:
    """As ``ask_engines``, with the exception in place of the answer of an engine that failed or took too long."""
    calls = [asyncio.wait_for(call(method), timeout) for call in _engines(engine_client)]
    return await asyncio.gather(*calls, return_exceptions=True)


def _engines(engine_client: Any) -> list[Callable[..., Coroutine[Any, Any, Any]]]:
    """A way to call each; vLLM's own ``call_utility_async`` reaches all, but tells only what the first one answers."""
    require(engine_client, "engine_core")
    core = engine_client.engine_core
    engines = getattr(core, "core_engines", None)
    if engines is not None and len(engines) > 1:
        require(core, "_call_utility_async")
        return [partial(core._call_utility_async, engine=engine) for engine in engines]
    require(core, "call_utility_async")
    return [core.call_utility_async]
