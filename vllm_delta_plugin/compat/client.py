"""Seam: vLLM's engine clients, through which a route, or who has an ``LLM``, asks the engines.

vLLM answers nothing that was asked of an engine which died since: EngineDeadError says so once vLLM has noticed.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from functools import partial
from threading import Thread
from typing import Any, TypeVar

from vllm.v1.engine.exceptions import EngineDeadError

from vllm_delta_plugin.compat.seam import require

__all__ = ["DEAD", "EngineDeadError", "ask_blocking", "ask_each", "ask_engines", "ask_one", "count_engines"]
Answer = TypeVar("Answer")
DEAD = "the engine has died, or is being shut down: see the server's log"
_LOOK = 0.5  # seconds between two looks whether the engine lives


def count_engines(engine_client: Any) -> int:
    """How many engines there are to ask."""
    return len(_engines(engine_client))


async def ask_engines(engine_client: Any, method: str, *args: Any, timeout: float) -> list[Any]:
    """Every engine's answer to a utility method, in engine order.

    Raises TimeoutError after ``timeout`` seconds, EngineDeadError once an engine has died.
    """
    calls = [call(method, *args) for call in _engines(engine_client)]
    return await _while_alive(engine_client, asyncio.gather(*calls), timeout)


async def ask_one(engine_client: Any, index: int, method: str, *args: Any, timeout: float) -> Any:
    """One engine's answer, IndexError if there is no such engine; else as ``ask_engines``."""
    return await _while_alive(engine_client, _engines(engine_client)[index](method, *args), timeout)


async def ask_each(engine_client: Any, method: str, *, timeout: float) -> list[Any]:
    """As ``ask_engines``, with the exception in place of the answer of an engine that failed or took too long."""
    calls = [_while_alive(engine_client, call(method), timeout) for call in _engines(engine_client)]
    return await asyncio.gather(*calls, return_exceptions=True)


def ask_blocking(core: Any, method: str, *args: Any, timeout: float) -> Any:
    """The engine's answer to an ``LLM``'s client; raises as ``ask_engines``.

    vLLM's own call has no deadline: given up, it leaves a thread behind that waits as long as the process lives.
    """
    require(core, "call_utility", "resources")
    require(core.resources, "engine_dead")
    answer: Future[Any] = Future()

    def ask() -> None:
        try:
            answer.set_result(core.call_utility(method, *args))
        except BaseException as error:  # noqa: BLE001 - raised in the caller's thread
            answer.set_exception(error)

    Thread(target=ask, name="delta-sync-ask", daemon=True).start()
    deadline = time.monotonic() + timeout
    while True:
        try:
            return answer.result(_until(deadline))
        except TimeoutError:
            if answer.done():  # in this moment, or the error is its own
                return answer.result()
            if core.resources.engine_dead:
                raise EngineDeadError from None
            if time.monotonic() >= deadline:
                raise


async def _while_alive(engine_client: Any, asked: Awaitable[Answer], timeout: float) -> Answer:
    require(engine_client, "errored")
    answer = asyncio.ensure_future(asked)
    deadline = time.monotonic() + timeout
    try:
        while not answer.done():
            if engine_client.errored:
                raise EngineDeadError
            if time.monotonic() >= deadline:
                raise TimeoutError
            await asyncio.wait([answer], timeout=_until(deadline))
        return answer.result()
    finally:
        answer.cancel()


def _until(deadline: float) -> float:
    return max(0.0, min(_LOOK, deadline - time.monotonic()))


def _engines(engine_client: Any) -> list[Callable[..., Coroutine[Any, Any, Any]]]:
    """A way to call each; vLLM's own ``call_utility_async`` reaches all, but tells only what the first one answers."""
    require(engine_client, "engine_core")
    core = engine_client.engine_core
    require(core, "core_engines")  # without it all but the first would go unasked, by operators too
    if len(core.core_engines) > 1:
        require(core, "_call_utility_async")
        return [partial(core._call_utility_async, engine=engine) for engine in core.core_engines]
    require(core, "call_utility_async")
    return [core.call_utility_async]
