"""ASGI middleware: adds the replica's metrics to what vLLM's own /metrics says.

The numbers live in the engines' processes, and an API server can't be reached from there; with several API servers
vLLM reads only files that each of them writes. So whichever server is scraped asks all engines then, and every one of
them answers the same.
"""

from __future__ import annotations

import math
import time
from typing import Any

from starlette.datastructures import MutableHeaders

from vllm_delta_plugin.compat.client import ask_each
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.prometheus import Answer, exposition
from vllm_delta_plugin.version_middleware import Message, Receive, Send

PATIENCE = 2.0  # seconds an engine has to answer; in a longer step the numbers before it are shown again
STALE = 60.0  # seconds for which they are; an engine that died says nothing at once
_PLAIN = (b"accept", b"accept-encoding")


class MetricsMiddleware:
    """Looks after GET /metrics; every other request passes unchanged."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._engines: list[_Engine] = []

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "GET" or scope["path"].rstrip("/") != "/metrics":
            await self._app(scope, receive, send)
            return
        ours = await self._exposition(scope["app"].state)
        plain = [(name, value) for name, value in scope["headers"] if name.lower() not in _PLAIN]

        async def send_more(message: Message) -> None:
            nonlocal ours
            if message["type"] == "http.response.start":
                ours = ours if message["status"] == 200 else b""
                headers = MutableHeaders(scope=message)
                if "content-length" in headers:
                    headers["content-length"] = str(int(headers["content-length"]) + len(ours))
            elif message["type"] == "http.response.body" and not message.get("more_body", False):
                message = {**message, "body": message.get("body", b"") + ours}
            await send(message)

        await self._app({**scope, "headers": plain}, receive, send_more)

    async def _exposition(self, state: Any) -> bytes:
        """Ours, empty for a server that follows no run or is still starting."""
        engine = getattr(state, "delta_sync_engine", None)
        if engine is None:
            return b""
        results = await ask_each(engine, "delta_sync_metrics", timeout=PATIENCE)
        del self._engines[len(results) :]  # vLLM can be told to go on with fewer, or with more
        self._engines += [_Engine(index) for index in range(len(self._engines), len(results))]
        for known, result in zip(self._engines, results, strict=True):
            known.hear(result)
        answers = [known.answer for known in self._engines]
        return exposition(answers) if any(answers) else b""


class _Engine:
    """What one engine's metrics are made of: its last answer for as long as that may stand for it."""

    def __init__(self, index: int) -> None:
        self.answer: Answer | None = None  # None: it never answered, or follows no run
        self._index = index
        self._heard_at = -math.inf
        self._silent = False

    def hear(self, result: Answer | BaseException | None) -> None:
        """An answer, or why there is none: then all but ``up`` goes with the engine, and the log says so once."""
        if not isinstance(result, BaseException):
            self.answer = None if result is None else {**result, "up": True}
            self._heard_at, self._silent = time.monotonic(), False
        elif not isinstance(result, TimeoutError) or time.monotonic() - self._heard_at > STALE:
            if self.answer is not None:
                self.answer = {"model": self.answer["model"], "up": False}
            if not self._silent:
                logger.warning("delta sync: engine %d is left out of /metrics: %r", self._index, result)
            self._silent = True
