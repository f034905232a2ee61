"""Asks for the key on every path but /health and /.

vLLM's own --api-key guards /v1 and leaves others open (/invocations generates too), and the environment server has no
key at all. A Space's address is public, so here nothing but its health is.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

KEYS = ("VLLM_API_KEY", "DELTA_SYNC_ADMIN_KEY")  # the second opens control routes, which check it themselves


def unusable(key: str) -> str | None:
    """Why no client could send ``key``, without showing it; None if one can.

    The rule of delta_sync/bearer.py, which clients hold keys against, and which the environment's image has not got.
    Stripped here alone, a key would still be another one to vLLM, which reads its variable itself.
    """
    if key.isascii() and key.isprintable() and key == key.strip():
        return None
    return (
        f"expected printable ASCII on one line, without spaces around it, got {len(key)} characters, some of them "
        "others. Remedy: enter the secret again, without the line break at its end"
    )


class Guard:
    """ASGI middleware: ``keys``, by default those of the environment, are what Authorization: Bearer may carry."""

    def __init__(self, app: App, keys: list[str] | None = None) -> None:
        found = keys if keys is not None else [os.environ.get(name, "") for name in KEYS]
        for trouble in filter(None, map(unusable, found)):
            raise ValueError(f"guard: a key: {trouble}")
        self._app, self._keys = app, [key.encode() for key in found if key]
        if not self._keys:
            raise ValueError(f"guard: expected a key, got none. Remedy: set {KEYS[0]}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it with 401; a WebSocket is closed before it opens (clients see 403)."""
        if scope["type"] == "http" and scope["path"] == "/":
            await _answer(send, 200, {"status": "running", "health": "/health"})  # what the Space's page shows
        elif scope["type"] == "lifespan" or scope["path"] == "/health" or self._accepts(scope["headers"]):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            await _answer(send, 401, {"error": "expected Authorization: Bearer KEY with this Space's key"})

    def _accepts(self, headers: list[tuple[bytes, bytes]]) -> bool:
        given = next((value for name, value in headers if name == b"authorization"), b"")
        scheme, _, key = given.partition(b" ")
        matches = [secrets.compare_digest(key, known) for known in self._keys]  # all of them: in constant time
        return scheme.lower() == b"bearer" and any(matches)


async def _answer(send: Send, status: int, body: dict[str, str]) -> None:
    headers = [(b"content-type", b"application/json")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})
