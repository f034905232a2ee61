"""An engine that dies takes with it what it was asked, and vLLM tells nobody: who asked hears of it all the same."""

from __future__ import annotations

import asyncio
import math
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
from fastapi import FastAPI
from helpers.tiny_models import build
from starlette.testclient import TestClient
from vllm.v1.engine.exceptions import EngineDeadError

from delta_sync.errors import SyncTimeoutError
from vllm_delta_plugin import sync
from vllm_delta_plugin.routes import DeltaSyncEndpoints

SOON = 5.0  # seconds; each question here would wait for half a minute at least
LATER = 0.2  # seconds until the engine dies


class DyingEngines:
    """Stands in for an API server's client: engines that take questions, answer none and die a little later."""

    def __init__(self, count: int) -> None:
        self.engine_core = self
        self.core_engines = list(range(count))
        self._dies = math.inf

    @property
    def errored(self) -> bool:
        return time.monotonic() > self._dies

    async def call_utility_async(self, method: str, *args: Any) -> Any:
        self._dies = time.monotonic() + LATER
        await asyncio.Event().wait()

    async def _call_utility_async(self, method: str, *args: Any, engine: int) -> Any:
        await self.call_utility_async(method, *args)


@pytest.fixture(params=[1, 2])
def client(request: pytest.FixtureRequest) -> TestClient:
    app = FastAPI()
    endpoints = DeltaSyncEndpoints()
    endpoints.attach_router(app)
    args: Any = SimpleNamespace(delta_sync_admin_key="an-admin-key", api_key=None, additional_config=None)
    asyncio.run(endpoints.init_state(DyingEngines(request.param), app.state, args))

    @app.post("/v1/completions")
    def completions() -> str:
        raise AssertionError("not let in")

    return TestClient(app, headers={"Authorization": "Bearer an-admin-key"})


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "status"),
        ("GET", "ready"),
        ("GET", "tensors"),
        ("GET", "tensors?scan=1"),
        ("GET", "tensors/lm_head.weight"),
        ("POST", "pin"),
        ("POST", "hint"),
    ],
)
def test_a_route_answers_soon(client: TestClient, method: str, path: str) -> None:
    begin = time.monotonic()
    answer = client.request(method, f"/delta_sync/{path}")
    assert time.monotonic() - begin < SOON
    assert answer.status_code == 503 and "engine has died" in answer.json()["error"]


def test_a_request_that_waits_for_a_version_waits_no_longer(client: TestClient) -> None:
    begin = time.monotonic()
    headers = {"x-delta-sync-min-version": "9", "x-delta-sync-timeout": "3000"}
    answer = client.post("/v1/completions", headers=headers, json={})
    assert time.monotonic() - begin < SOON
    assert answer.status_code == 503 and answer.json()["delta_sync"]["reason"] == "dead"


def test_metrics_go_on_without_it(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_plugin.metrics_middleware.PATIENCE", 60.0)
    begin = time.monotonic()
    client.app.add_api_route("/metrics", lambda: "vLLM's")  # type: ignore[attr-defined]
    assert client.get("/metrics").text == '"vLLM\'s"'
    assert time.monotonic() - begin < SOON


class DyingCore:
    """Stands in for the client of an ``LLM`` whose engine is a process."""

    def __init__(self, lifetime: float) -> None:
        self._lifetime, self._dies = lifetime, math.inf
        self.resources = self

    @property
    def engine_dead(self) -> bool:
        return time.monotonic() > self._dies

    def call_utility(self, method: str, *args: Any) -> Any:
        self._dies = time.monotonic() + self._lifetime
        time.sleep(60)


def test_an_llm_does_not_wait_for_a_dead_engine() -> None:
    begin = time.monotonic()
    with pytest.raises(EngineDeadError):
        sync(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=DyingCore(LATER))), 9, timeout=600.0)
    assert time.monotonic() - begin < SOON


def test_an_llm_does_not_wait_for_ever_for_one_that_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_plugin.offline._PATIENCE", 0.3)
    with pytest.raises(SyncTimeoutError, match=r"the engine's answer, expected within 0\.5 s"):
        sync(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=DyingCore(math.inf))), 9, timeout=0.2)


@pytest.mark.long
def test_a_real_llms_engine_dies_while_it_is_waited_for(tmp_path: Path) -> None:
    base = build(tmp_path / "base", "llama")
    llm = {**fresh.ENGINE, **fresh.following(tmp_path / "run")}
    found = fresh.run(tmp_path / "child", "dying_llm.py", {"model": str(base), "llm": llm}, multiprocessing=True)
    assert found["error"] == "EngineDeadError" and found["seconds"] < 30, found
