"""The middleware behind /metrics where an engine is slow, gone or none, and where vLLM's own answer is no metrics."""

from __future__ import annotations

import asyncio
import logging
import time
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from helpers.scrape import parse
from starlette.testclient import TestClient

from vllm_delta_plugin import metrics_middleware
from vllm_delta_plugin.metrics_middleware import MetricsMiddleware
from vllm_delta_plugin.status import Facts, Status

VLLMS = "# HELP vllm:up x\n# TYPE vllm:up gauge\nvllm:up 1.0\n"


class Core:
    """Stands in for an engine's client, which can't be made to hang or die at will."""

    def __init__(self) -> None:
        self.delay, self.error = 0.0, None
        self.core_engines = [self]
        self.status: Status | None = Status(Facts("r", "/run", "m", "BF16", "processed_logprobs", "f"))

    async def call_utility_async(self, method: str) -> dict[str, Any] | None:
        return await self._call_utility_async(method, engine=None)

    async def _call_utility_async(self, method: str, *, engine: Any) -> dict[str, Any] | None:
        if engine is not None and engine is not self:
            return await engine.call_utility_async(method)
        assert method == "delta_sync_metrics"
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        return self.status and {**self.status.to_dict(), "measures": self.status.measures.to_dict()}


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def client(core: Core) -> TestClient:
    app = FastAPI()
    app.add_middleware(MetricsMiddleware)
    app.state.delta_sync_engine = SimpleNamespace(engine_core=core, errored=False)
    app.state.code = 200

    @app.get("/metrics")
    def metrics() -> PlainTextResponse:
        return PlainTextResponse(VLLMS, app.state.code)

    @app.get("/other")
    def other() -> str:
        return "other"

    return TestClient(app)


def test_ours_come_after_vllms(client: TestClient) -> None:
    text = client.get("/metrics").text
    assert text.startswith(VLLMS)
    assert 'delta_sync_lag_versions{engine="0",model_name="m"} 0.0\n' in text
    assert client.get("/other").json() == "other"
    assert client.post("/metrics").status_code == 405


def test_a_slow_engines_last_numbers_are_shown_again(
    client: TestClient, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_middleware, "PATIENCE", 0.1)
    core.delay = 5.0
    assert client.get("/metrics").text == VLLMS, "nothing is known yet"
    core.delay = 0.0
    assert core.status is not None
    core.status.saw(7)
    before = client.get("/metrics").text
    assert 'delta_sync_newest_version{engine="0",model_name="m"} 7.0\n' in before
    core.delay = 5.0
    core.status.saw(8)
    assert client.get("/metrics").text.split("delta_sync_lag_seconds")[0] == before.split("delta_sync_lag_seconds")[0]


def test_a_dead_engine_hides_nothing_that_vllm_says(client: TestClient, core: Core) -> None:
    core.error = RuntimeError("EngineDeadError")
    assert client.get("/metrics").text == VLLMS


def our_samples(client: TestClient) -> dict[tuple[str, str], float]:
    """(name, engine) -> value."""
    found = parse(client.get("/metrics").text.removeprefix(VLLMS))
    return {(name, dict(labels)["engine"]): value for (name, labels), value in found.items()}


def test_a_dead_engines_numbers_are_gone_at_once_and_one_of_two_alone(
    client: TestClient, core: Core, caplog: pytest.LogCaptureFixture
) -> None:
    other = Core()
    core.core_engines = [core, other]
    assert {engine for _, engine in our_samples(client)} == {"0", "1"}
    caplog.set_level(logging.WARNING, "vllm.delta_sync")  # importing TRL silences vLLM's
    logging.getLogger("vllm.delta_sync").addHandler(caplog.handler)  # vLLM's loggers do not propagate
    core.error = RuntimeError("EngineDeadError")
    for _ in range(3):
        found = our_samples(client)
        assert [name for name, engine in found if engine == "0"] == ["delta_sync_engine_up"]
        assert (found["delta_sync_engine_up", "0"], found["delta_sync_engine_up", "1"]) == (0.0, 1.0)
        assert ("delta_sync_served_version", "1") in found
    logging.getLogger("vllm.delta_sync").removeHandler(caplog.handler)
    assert [record.levelname for record in set(caplog.records)] == ["WARNING"], "once, not at every scrape"
    assert "engine 0" in caplog.text and "EngineDeadError" in caplog.text
    core.error = None
    assert our_samples(client)["delta_sync_engine_up", "0"] == 1.0


def test_an_engine_that_hangs_is_no_longer_shown_in_the_end(
    client: TestClient, core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metrics_middleware, "PATIENCE", 0.05)
    monkeypatch.setattr(metrics_middleware, "STALE", 0.3)
    client.get("/metrics")
    core.delay = 5.0
    assert ("delta_sync_served_version", "0") in our_samples(client), "a long step is no failure"
    time.sleep(0.3)
    assert our_samples(client) == {("delta_sync_engine_up", "0"): 0.0}


def test_nothing_is_added_where_there_is_nothing_to_say(client: TestClient, core: Core) -> None:
    core.status = None  # an engine that follows no run
    assert client.get("/metrics").text == VLLMS
    client.app.state.delta_sync_engine = None  # a server that is still starting
    assert client.get("/metrics").text == VLLMS


def test_an_error_stays_an_error(client: TestClient) -> None:
    client.app.state.code = 500
    answer = client.get("/metrics")
    assert (answer.status_code, answer.text) == (500, VLLMS)
