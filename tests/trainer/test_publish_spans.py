"""What of a publisher's work gets into which trace, when steps pile up and when the store fails."""

from __future__ import annotations

import time
from collections.abc import Iterator

import bucket
import pytest
from helpers.otlp import Collector, collector
from test_publisher import running

from delta_sync import tracing

PARTS = {"detect", "encode", "upload", "commit"}


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with collector() as spans:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", spans.url)
        yield spans
        tracing._provider.shutdown()
        tracing._provider = None


def parts(found: dict) -> set[str]:
    return {name.removeprefix("delta_sync.publish.") for name in found if name != "delta_sync.publish"}


def test_each_version_names_the_trace_of_its_own_step(spans: Collector) -> None:
    with running() as run:
        run.metrics.note({"loss": 0.5, "reward": -1, "delta_sync/bytes": 7.0, "text": "no", "bad name": 1.0})
        run.publisher.flush(120)
        run.store.gate.clear()
        traces = []
        for step in (1, 2, 3):
            run.train(publish=False)
            traces.append(tracing.begin("delta_sync.publish", step=step))
            run.publisher.capture(run.image, step, trace=traces[-1])
            time.sleep(0.5)  # the first gets in flight, the second waits, the third takes its place
        run.store.gate.set()
        run.check()
        versions = bucket.chain(run.uri)
    tracing.flush(120)
    origin, *deltas = versions
    assert [m.traceparent for m in deltas] == [traces[0].traceparent, traces[2].traceparent]
    assert origin.traceparent is not None and origin.metrics == {}
    assert [m.metrics for m in deltas] == [{"loss": 0.5, "reward": -1.0}] * 2
    first, replaced, last = (spans.ours(str(trace.traceparent)[3:35]) for trace in traces)
    assert parts(first) == parts(last) == PARTS
    assert parts(replaced) == {"detect"}
    assert replaced["delta_sync.publish"].attributes["delta_sync.coalesced"] is True
    assert parts(spans.ours(origin.traceparent[3:35])) == {"commit"}, "it changes nothing, so has no object"
    for manifest, found in zip(deltas, (first, last), strict=True):
        assert found["delta_sync.publish"].attributes["delta_sync.version"] == manifest.version


def test_a_commit_that_is_tried_again_keeps_its_trace(spans: Collector) -> None:
    with running() as run:
        run.publisher.flush(120)
        run.store.faults = [("deltas/", False), ("manifests/", True), ("manifests/", False)]
        run.metrics.note({"loss": 0.5})
        trace = tracing.begin("delta_sync.publish", step=1)
        run.train(publish=False)
        run.publisher.capture(run.image, 1, trace=trace)
        run.check()
        [_, delta] = bucket.chain(run.uri)
    tracing.flush(120)
    assert (delta.traceparent, delta.metrics) == (trace.traceparent, {"loss": 0.5})
    mine = [span for span in spans.spans if span.trace == str(trace.traceparent)[3:35]]
    assert sorted(span.name for span in mine if span.error == "StoreError")[:1] == ["delta_sync.publish.encode"]
    assert [span.error for span in mine if span.name == "delta_sync.publish"] == [None]


def test_of_too_many_numbers_the_known_ones_stay(spans: Collector) -> None:
    with running() as run:
        run.metrics.note({**{f"a{i:03d}": i for i in range(100)}, "loss": 1.0, "nan": float("nan"), "reward": 2.0})
        kept = run.metrics.logged()
    assert len(kept) == 64
    assert list(kept)[:3] == ["reward", "loss", "a000"]
