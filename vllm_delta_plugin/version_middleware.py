"""ASGI middleware: says which versions answered, and makes a request wait for the version that it asks for."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response

from delta_sync.errors import FormatError
from vllm_delta_plugin.request_versions import CURRENT, RequestVersions
from vllm_delta_plugin.version_gate import DRAIN_TIMEOUT, bad_header, changed, let_in
from vllm_delta_plugin.version_wish import VersionWish, read_timeout
from vllm_delta_plugin.weights_label import LABEL, SESSION

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# Under /v1/ everything is computed with the weights but for these, some of which end what a drain waits for.
_WITHOUT_WEIGHTS = (
    "/cancel",
    "/abort_requests",
    "/load_lora_adapter",
    "/unload_lora_adapter",
    "/count_tokens",
    "/render",
    "/derender",
)
_ELSEWHERE = (
    "/invocations",
    "/cohere/v2/chat",
    "/generative_scoring",
    "/pooling",
    "/classify",
    "/score",
    "/rerank",
    "/v2/embed",
    "/v2/rerank",
)
# What streamed responses say at once, when nobody knows yet which version will answer.
_BEFORE_TOKENS = (b"event: response.created\n", b"event: response.in_progress\n")


def uses_weights(path: str) -> bool:
    """Whether what is posted there is computed with the weights."""
    return ("/v1/" in path and not path.endswith(_WITHOUT_WEIGHTS)) or path.endswith(_ELSEWHERE)


class VersionMiddleware:
    """Looks after every POST that is computed with the weights; other requests pass unchanged."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """One request."""
        if scope["type"] != "http" or scope["method"] != "POST" or not uses_weights(scope["path"]):
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        wish = None
        try:
            wish = VersionWish.read(headers)
            refusal = await let_in(scope["app"].state, wish, read_timeout(headers, DRAIN_TIMEOUT))
        except FormatError as error:
            refusal = bad_header(error)
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._answer(scope, receive, send, RequestVersions(wish, headers.get(SESSION)))

    async def _answer(self, scope: Message, receive: Receive, send: Send, versions: RequestVersions) -> None:
        answer = _Answer(versions, send)
        token = CURRENT.set(versions)
        try:
            await self._app(scope, _until_spoiled(receive, versions), answer.send)
        finally:
            CURRENT.reset(token)
        await answer.end(scope, receive)


class _Answer:
    """Holds the response's start back until its first bytes that come after the first token."""

    def __init__(self, versions: RequestVersions, send: Send) -> None:
        self._versions, self._send = versions, send
        self._held: list[Message] = []
        self._started = self._finished = self._events = False

    async def send(self, message: Message) -> None:
        """What vLLM sends, with our header; once spoiled nothing more passes."""
        if self._versions.spoiled.is_set():
            return
        if message["type"] == "http.response.start" or self._may_wait(message):
            self._held.append(message)
            return
        await self._start()
        self._finished = not message.get("more_body", False)
        await self._send(message)

    def _may_wait(self, message: Message) -> bool:
        early = bool(self._held) and self._versions.header is None
        return early and bytes(message.get("body", b"")).startswith(_BEFORE_TOKENS)

    async def _start(self) -> None:
        if not self._held:
            return
        held, self._held, self._started = self._held, [], True
        headers = MutableHeaders(scope=held[0])
        self._events = headers.get("content-type", "").startswith("text/event-stream")
        if (text := self._versions.header) is not None:
            headers[LABEL] = text
        for message in held:
            await self._send(message)

    async def end(self, scope: Message, receive: Receive) -> None:
        """After vLLM's last message: if the answer got spoiled, say so in its place or at its end."""
        if not self._versions.spoiled.is_set() or self._finished:
            return
        refusal = changed(self._versions)
        if not self._started:
            await refusal(scope, receive, self._send)
            return
        text = _as_event(refusal) if self._events else b""
        await self._send({"type": "http.response.body", "body": text, "more_body": False})


def _as_event(refusal: Response) -> bytes:
    return b"data: " + json.dumps(json.loads(bytes(refusal.body))).encode() + b"\n\ndata: [DONE]\n\n"


def _until_spoiled(receive: Receive, versions: RequestVersions) -> Receive:
    """Tells vLLM that the client has gone once the answer is spoiled, so that it ends the request itself."""
    if versions.wish is None:
        return receive

    async def receive_or_end() -> Message:
        message = asyncio.ensure_future(receive())
        spoiled = asyncio.ensure_future(versions.spoiled.wait())
        try:
            await asyncio.wait((message, spoiled), return_when=asyncio.FIRST_COMPLETED)
            return message.result() if message.done() else {"type": "http.disconnect"}
        finally:
            message.cancel()
            spoiled.cancel()

    return receive_or_end
