"""Seam: the async engine client in an API server process, through which a route asks the engines."""

from __future__ import annotations

import asyncio
from typing import Any

from vllm_delta_plugin.compat.seam import require


async def ask_engines(engine_client: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Every engine's answer to a utility method, in engine order; TimeoutError after ``timeout`` seconds."""
    require(engine_client, "engine_core")
    core = engine_client.engine_core
    engines = getattr(core, "core_engines", None)
    if engines is not None and len(engines) > 1:
        require(core, "_call_utility_async")
        calls = [core._call_utility_async(method, *args, engine=engine) for engine in engines]
    else:
        require(core, "call_utility_async")
        calls = [core.call_utility_async(method, *args)]
    return await asyncio.wait_for(asyncio.gather(*calls), timeout)
