"""Spans as a collector receives them, over HTTP and by OpenTelemetry's own exporter; and nothing where they are off."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from helpers.otlp import Collector, collector

from delta_sync import tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector that the environment names."""
    with collector() as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.url)
        yield spans
        end(monkeypatch)


def end(monkeypatch: pytest.MonkeyPatch) -> None:
    if tracing._provider is not None:
        tracing._provider.shutdown()
    tracing._provider, tracing._failed = None, False


def python(code: str, **environment: str) -> str:
    env = {name: value for name, value in os.environ.items() if not name.startswith("OTEL_")} | environment
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=120, check=True
    )
    return done.stdout + done.stderr


def test_a_trace_goes_on_from_the_other_sides_span(spans: Collector) -> None:
    began = time.time() - 5
    root = tracing.begin("delta_sync.take", began=began, parent=PARENT, version=3, run=None)
    root.child("delta_sync.take.stage", began + 1, began + 2, bytes=7)
    root.child("delta_sync.take.notice", began + 1, began)  # a clock that went back
    with root.current(), tracing.span("delta_sync.publish.upload"):
        time.sleep(0.01)
    with pytest.raises(KeyError), root.current(), tracing.span("delta_sync.publish.commit"):
        raise KeyError("hf_secret")
    with tracing.span("delta_sync.publish.encode"):
        pass  # nothing is current here
    assert root.traceparent is not None
    assert root.traceparent[:36] == PARENT[:36]
    root.end(began + 3, error="IntegrityError")
    root.end()
    tracing.flush(10)
    found = spans.ours(PARENT[3:35])
    assert found.keys() == {
        "delta_sync.take", "delta_sync.take.stage", "delta_sync.take.notice",
        "delta_sync.publish.upload", "delta_sync.publish.commit",
    }  # fmt: skip
    take = found.pop("delta_sync.take")
    assert (take.parent, take.error, take.attributes["error.type"]) == (PARENT[36:52], *["IntegrityError"] * 2)
    assert take.attributes["delta_sync.version"] == 3
    assert "delta_sync.run" not in take.attributes
    assert {span.parent for span in found.values()} == {take.id}
    assert (take.began, take.ended) == pytest.approx((began, began + 3))
    assert found["delta_sync.take.stage"].attributes["delta_sync.bytes"] == 7
    assert found["delta_sync.take.notice"].began == found["delta_sync.take.notice"].ended
    assert found["delta_sync.publish.upload"].ended - found["delta_sync.publish.upload"].began >= 0.01
    assert found["delta_sync.publish.commit"].error == "KeyError"
    assert b"hf_secret" not in spans.raw, "an error's text is nobody's business"


@pytest.mark.parametrize("parent", [None, "", "nonsense", "00-" + "0" * 32 + "-" + "0" * 16 + "-01"])
def test_without_a_good_parent_a_trace_begins(spans: Collector, parent: str | None) -> None:
    root = tracing.begin("delta_sync.publish", parent=parent)
    assert root.traceparent is not None
    root.end()
    tracing.flush(10)
    [span] = spans.ours(root.traceparent[3:35]).values()
    assert span.parent == ""
    assert abs(span.began - time.time()) < 30


def test_a_collector_that_is_away_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with collector() as gone:
        url = gone.url
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", f"{url}/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    began = time.monotonic()
    for _ in range(200):
        tracing.begin("delta_sync.publish").end()
    assert time.monotonic() - began < 5
    end(monkeypatch)
    assert time.monotonic() - began < 30


OFF = """
import sys
from delta_sync import tracing
root = tracing.begin("delta_sync.publish", step=1)
assert root is tracing.OFF and root.traceparent is None
root.child("delta_sync.publish.encode", 0.0, 1.0)
with root.current(), tracing.span("delta_sync.publish.upload"):
    pass
root.end()
tracing.flush(1)
assert [name for name in sys.modules if name.startswith("opentelemetry")] == []
"""


@pytest.mark.parametrize("environment", [{}, {"OTEL_SDK_DISABLED": "true", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://x"}])
def test_off_imports_nothing(environment: dict[str, str]) -> None:
    assert python(OFF, **environment) == ""


MISSING = """
import sys
sys.modules["opentelemetry.sdk"] = None
from delta_sync import tracing
for _ in range(3):
    assert tracing.begin("delta_sync.publish") is tracing.OFF
"""


def test_a_missing_package_is_said_once() -> None:
    said = python(MISSING, OTEL_EXPORTER_OTLP_ENDPOINT="http://127.0.0.1:1")
    assert said.count("\n") == 1
    assert "pip install 'delta-weight-sync[otel]'" in said


def test_a_protocol_that_is_none_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://user:hf_secret@127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_PROTOCOL", "carrier-pigeon")
    with caplog.at_level(logging.WARNING):
        assert tracing.begin("delta_sync.publish") is tracing.begin("delta_sync.publish") is tracing.OFF
    end(monkeypatch)
    [record] = caplog.records
    assert "carrier-pigeon" in record.getMessage()
    assert "hf_secret" not in record.getMessage()


def test_the_programs_own_provider_is_used(spans: Collector) -> None:
    code = """
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(ConsoleSpanExporter()))
trace.set_tracer_provider(provider)
from delta_sync import tracing
tracing.begin("delta_sync.publish").end()
assert tracing._provider is None
"""
    assert '"name": "delta_sync.publish"' in python(code, OTEL_EXPORTER_OTLP_ENDPOINT=spans.url)
    assert spans.spans == []
