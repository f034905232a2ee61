"""The middleware behind /metrics where an engine is slow, gone or none, and where vLLM's own answer is no metrics."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import PlainTextResponse
from starlette.testclient import TestClient

from vllm_delta_plugin import metrics_middleware
from vllm_delta_plugin.metrics_middleware import MetricsMiddleware
from vllm_delta_plugin.status import Facts, Status

VLLMS = "# HELP vllm:up x\n# TYPE vllm:up gauge\nvllm:up 1.0\n"


class Core:
    """Stands in for an engine's client, which can't be made to hang or die at will."""

    def __init__(self) -> None:
        self.delay, self.error = 0.0, None
        self.status: Status | None = Status(Facts("r", "/run", "m", "BF16", "processed_logprobs", "f"))

    async def call_utility_async(self, method: str) -> dict[str, Any] | None:
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
    app.state.delta_sync_engine = SimpleNamespace(engine_core=core)
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


def test_nothing_is_added_where_there_is_nothing_to_say(client: TestClient, core: Core) -> None:
    core.status = None  # an engine that follows no run
    assert client.get("/metrics").text == VLLMS
    client.app.state.delta_sync_engine = None  # a server that is still starting
    assert client.get("/metrics").text == VLLMS


def test_an_error_stays_an_error(client: TestClient) -> None:
    client.app.state.code = 500
    answer = client.get("/metrics")
    assert (answer.status_code, answer.text) == (500, VLLMS)
