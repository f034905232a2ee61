"""ASGI middleware: adds the replica's metrics to what vLLM's own /metrics says.

The numbers live in the engines' processes, and an API server can't be reached from there; with several API servers
vLLM reads only files that each of them writes. So whichever server is scraped asks all engines then, and every one of
them answers the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.datastructures import MutableHeaders

from vllm_delta_plugin.compat.client import ask_engines
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.prometheus import Answer, exposition
from vllm_delta_plugin.version_middleware import Message, Receive, Send

PATIENCE = 2.0  # seconds an engine has to answer; in a longer step the numbers before it are shown again
_PLAIN = (b"accept", b"accept-encoding")


class MetricsMiddleware:
    """Looks after GET /metrics; every other request passes unchanged."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._last: Sequence[Answer] = ()

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
        try:
            answers = await ask_engines(engine, "delta_sync_metrics", timeout=PATIENCE)
            self._last = [answer for answer in answers if answer is not None]
        except TimeoutError:
            pass
        except Exception:  # noqa: BLE001  # a dead engine must not hide what vLLM says of it
            logger.debug("delta sync: no metrics from the engine", exc_info=True)
        return exposition(self._last) if self._last else b""
