"""Which requests the middleware looks after, and what it does with an answer: the parts without an engine."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_plugin.gate import Gate
from vllm_delta_plugin.request_versions import CURRENT
from vllm_delta_plugin.version_middleware import VersionMiddleware, uses_weights
from vllm_delta_plugin.weights_label import WeightsLabel

SERVING = Path(__file__).parents[2] / "docs" / "SERVING.md"
GENERATE = {
    *("/v1/completions", "/v1/chat/completions", "/v1/chat/completions/batch", "/v1/responses", "/v1/messages"),
    *("/v1/systemone", "/v1/audio/transcriptions", "/v1/audio/translations"),
    *("/inference/v1/generate", "/invocations", "/cohere/v2/chat", "/generative_scoring"),
}
POOL = {
    *("/v1/embeddings", "/v1/score", "/v1/rerank", "/v2/rerank", "/v2/embed"),
    *("/pooling", "/classify", "/score", "/rerank"),
}
CREATED, IN_PROGRESS, TOKEN = (
    f"event: response.{name}\ndata: {{}}\n\n".encode() for name in ("created", "in_progress", "output_text.delta")
)
START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}


class Barred(Exception):
    """A request came to the gate."""


def posted(path: str, app: Callable[..., Any], state: SimpleNamespace | None = None, **headers: str) -> list[Any]:
    """What a client gets for a POST; without ``state`` from a server that follows nothing, and so has no gate."""
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    named = [(f"x-delta-sync-{name}".encode(), value.encode()) for name, value in headers.items()]
    scope = {"type": "http", "method": "POST", "path": path, "headers": named}
    scope["app"] = SimpleNamespace(state=state or SimpleNamespace())
    asyncio.run(VersionMiddleware(app)(scope, receive, send))
    return sent


def answering(*pieces: bytes | WeightsLabel) -> Callable[..., Any]:
    """An app that sends these and gets tokens by these weights in between."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        versions = CURRENT.get()
        assert versions is not None
        await send({**START, "headers": [*START["headers"]]})
        for piece in pieces:
            if isinstance(piece, WeightsLabel):
                versions.choice("p", 0).add(piece, 1)
            else:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return app


def bodies(sent: Sequence[Any]) -> list[bytes]:
    return [message["body"] for message in sent[1:]]


def header(sent: Sequence[Any]) -> bytes | None:
    assert sent[0]["type"] == "http.response.start"
    return dict(sent[0]["headers"]).get(b"x-delta-sync-version")


def test_all_of_vllms_routes_that_compute_with_the_weights_are_looked_after() -> None:
    spec = find_spec("vllm")
    assert spec is not None and spec.origin is not None
    sources = [path.read_text() for path in (Path(spec.origin).parent / "entrypoints").rglob("*.py")]
    posts = {found for text in sources for found in re.findall(r"""\.post\(\s*"(/[^"]*)\"""", text)}
    assert {"/v1/completions", "/invocations", "/v1/responses/{response_id}/cancel", "/pause"} <= posts
    assert {path for path in posts if uses_weights(path)} == posts & (GENERATE | POOL)


@pytest.mark.parametrize("path", sorted(GENERATE | POOL))
def test_what_uses_the_weights_comes_to_the_gate(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def let_in(*_: Any) -> None:
        raise Barred

    monkeypatch.setattr("vllm_delta_plugin.version_middleware.let_in", let_in)
    with pytest.raises(Barred):
        posted(path, answering())
    assert posted(f"/behind/a/proxy{path}", answering(), version="two")[0]["status"] == 400


@pytest.mark.parametrize(
    "path",
    [
        "/v1/responses/resp_1/cancel", "/v1/load_lora_adapter", "/v1/unload_lora_adapter", "/v1/messages/count_tokens",
        "/v1/chat/completions/render", "/v1/completions/derender", "/inference/v1/abort_requests", "/abort_requests",
        "/tokenize", "/pause", "/delta_sync/pin",
    ],
)  # fmt: skip
def test_what_does_not_passes_it(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def let_in(*_: Any) -> None:
        raise Barred

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert CURRENT.get() is None
        await send(START)

    monkeypatch.setattr("vllm_delta_plugin.version_middleware.let_in", let_in)
    assert posted(path, app, version="1") == [START]


class Draining:
    """An engine whose running requests never end; a look at its gate takes a second of its clock."""

    errored = False
    core_engines = (b"0",)

    def __init__(self) -> None:
        self.engine_core, self.gate, self.now = self, Gate(), 0.0
        self.gate.close()

    def monotonic(self) -> float:
        return self.now

    async def call_utility_async(self, method: str, seconds: float) -> bool:
        assert method == "delta_sync_enter"
        entered = self.gate.enter(seconds)
        while not entered.done():
            self.now += 1
            self.gate.expire()
        return entered.result()


@pytest.mark.parametrize(("headers", "seconds"), [({}, 90), ({"timeout": "7"}, 7)])
def test_a_drain_is_waited_for_as_long_as_the_documentation_says(
    headers: dict[str, str], seconds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Draining()
    monkeypatch.setattr("vllm_delta_plugin.gate.time", engine)
    state = SimpleNamespace(delta_sync_transition="sync", delta_sync_engine=engine)
    start, *rest = posted("/v1/completions", answering(TOKEN), state, **headers)
    assert engine.now == seconds
    assert (start["status"], dict(start["headers"])[b"retry-after"]) == (425, b"1")
    told = json.loads(rest[0]["body"])
    assert told["delta_sync"] == {"reason": "draining"}
    assert told["error"]["message"].endswith(f"not done after {seconds} s")
    [row] = [line for line in SERVING.read_text().splitlines() if line.startswith("| `sync` |")]
    assert "425 `draining` after 90 s" in row


@pytest.mark.parametrize(
    ("pieces", "version"),
    [
        ([CREATED, IN_PROGRESS, WeightsLabel(7, 1), TOKEN, WeightsLabel(8, 1), TOKEN], b"7"),
        ([CREATED, IN_PROGRESS, b"event: error\n\n", WeightsLabel(7, 1), TOKEN], None),
        ([b": keep-alive\n\n", CREATED, WeightsLabel(7, 1), TOKEN], None),
        ([WeightsLabel(7, 1), CREATED], b"7"),
        ([b"data: {}\n\n", WeightsLabel(7, 1)], None),
    ],
)
def test_a_streamed_response_says_its_first_tokens_version(
    pieces: list[bytes | WeightsLabel], version: bytes | None
) -> None:
    sent = posted("/v1/responses", answering(*pieces))
    assert header(sent) == version
    assert bodies(sent) == [*(piece for piece in pieces if isinstance(piece, bytes)), b""]


def test_nothing_is_held_back_for_longer_than_the_first_events() -> None:
    waiting: list[int] = []
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        for message in (START, *({"type": "http.response.body", "body": b, "more_body": True} for b in EVENTS)):
            await send(message)
            waiting.append(len(sent))

    async def keep(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        await asyncio.Event().wait()

    EVENTS = (CREATED, IN_PROGRESS, TOKEN, CREATED)
    scope = {"type": "http", "method": "POST", "path": "/v1/responses", "headers": []}
    asyncio.run(VersionMiddleware(app)({**scope, "app": SimpleNamespace(state=SimpleNamespace())}, receive, keep))
    assert waiting == [0, 0, 0, 4, 5]


def test_a_response_whose_first_token_is_not_as_asked_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    async def let_in(*_: Any) -> None:
        return None

    monkeypatch.setattr("vllm_delta_plugin.version_middleware.let_in", let_in)
    sent = posted("/v1/responses", answering(CREATED, WeightsLabel(8, 1), TOKEN), version="7")
    assert sent[0]["status"] == 409
    assert json.loads(bodies(sent)[0])["delta_sync"]["reason"] == "changed"
