"""What a replica measures, and the text that Prometheus reads of it."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from delta_sync.errors import DeltaSyncError
from vllm_delta_plugin.compat.engine_core import _returned
from vllm_delta_plugin.measures import BUCKETS, KINDS, Measures
from vllm_delta_plugin.output_clock import OutputClock
from vllm_delta_plugin.prometheus import METRICS, STATES, exposition
from vllm_delta_plugin.status import Facts, Refusal, Served, Status


def status_of(model: str = "m") -> Status:
    return Status(Facts("r", "/tmp/run", model, "BF16", "processed_logprobs", "f"))


def answer(status: Status) -> dict[str, Any]:
    return {**status.to_dict(), "measures": status.measures.to_dict()}


def samples(*statuses: Status) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """(sample name, its labels but model_name) -> value."""
    text = exposition([answer(status) for status in statuses]).decode()
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if k != "model_name"))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_metric_is_there_from_the_start_and_none_twice() -> None:
    status = status_of()
    status.update(looked_at=1.0)
    text = exposition([answer(status)]).decode()
    names = [family.name for family in text_string_to_metric_families(text)]
    assert names == [metric.name.removesuffix("_total") for metric in METRICS]
    assert len(set(names)) == len(names)
    for metric in METRICS:
        assert metric.name.startswith("delta_sync_")
        assert metric.name.endswith("_total") == (metric.kind == "counter")
        assert f"# HELP {metric.name} {metric.help}\n" in text


def test_a_refused_version_is_there_with_its_kind_while_it_is_refused() -> None:
    status = status_of()

    def shown() -> dict[str, float]:
        found = samples(status).items()
        return {dict(labels)["kind"]: v for (name, labels), v in found if name == "delta_sync_refused_version"}

    assert shown() == {"": 0.0}
    for kind, label in (("IntegrityError", "IntegrityError"), ("Surprise", "other")):
        status.refuse(Refusal(7, "m", None, kind, "why"))
        assert shown() == {label: 7.0}
    status.serves(Served("run", 7, 1, "m"))
    assert shown() == {"": 0.0}


def test_a_histogram_counts_each_observation_once_and_upwards() -> None:
    status = status_of()
    for seconds in (0.0004, 0.0005, 0.02, 99.0):
        status.measures.committed({"commit_seconds": seconds, "fetched_bytes": 10}, 3)
    found = samples(status)
    buckets = {
        dict(labels)["le"]: value
        for (name, labels), value in found.items()
        if name == "delta_sync_commit_seconds_bucket"
    }
    assert (buckets["0.0005"], buckets["0.01"], buckets["0.025"], buckets["2.5"], buckets["+Inf"]) == (2, 2, 3, 3, 4)
    assert len(buckets) == len(BUCKETS["commit_seconds"]) + 1
    engine = (("engine", "0"),)
    assert found["delta_sync_commit_seconds_sum", engine] == pytest.approx(99.0209)
    assert found["delta_sync_commit_seconds_count", engine] == 4
    assert found["delta_sync_gap_seconds_count", engine] == 0
    assert found["delta_sync_fetched_bytes_total", engine] == 40
    assert found["delta_sync_changed_elements_total", engine] == 12


def test_kinds_of_failures_are_bounded() -> None:
    measures = Measures()
    for kind in ("IntegrityError", "RolledBack/ValueError", "x" * 1000, "Über", "StageTooLargeError"):
        measures.failed(kind)
    assert set(measures.failures) == set(KINDS)
    assert (measures.failures["IntegrityError"], measures.failures["RolledBack"], measures.failures["other"]) == (
        1,
        1,
        3,
    )

    def below(kind: type[DeltaSyncError]) -> set[str]:
        return {k.__name__ for k in kind.__subclasses__() if k.__module__ == "delta_sync.errors"}.union(
            *(below(k) for k in kind.__subclasses__())
        )

    assert below(DeltaSyncError) - {"ResetError", "StillRunningError"} <= set(KINDS)


def test_engines_stay_apart_and_only_one_state_holds() -> None:
    first, second = status_of(), status_of()
    first.serves(Served("run", 3, 1, "a" * 64))
    second.update(poisoned=True)
    found = samples(first, second)
    assert found["delta_sync_served_version", (("engine", "0"),)] == 3
    assert found["delta_sync_served_version", (("engine", "1"),)] == 0
    for engine, now in (("0", "live"), ("1", "poisoned")):
        for state in STATES:
            labels = (("engine", engine), ("state", state))
            assert found["delta_sync_state", labels] == (state == now)
        assert found["delta_sync_ready", (("engine", engine),)] == (engine == "0")


def test_labels_are_escaped() -> None:
    found = exposition([answer(status_of('a"b\nc\\'))]).decode()
    assert 'model_name="a\\"b\\nc\\\\"' in found
    assert list(text_string_to_metric_families(found))


def test_lag_in_seconds_is_the_age_of_the_oldest_version_not_served() -> None:
    status, now = status_of(), time.time()
    assert status.lag_seconds == 0
    for version in (1, 2, 3):
        status.saw(version, now - 40 + 10 * version)
    assert status.lag_seconds == pytest.approx(30, abs=1)
    sighting = status.sighting(2)
    assert sighting is not None and sighting.seen >= now
    status.serves(Served("run", 1, 1, "a" * 64))
    assert status.lag_seconds == pytest.approx(20, abs=1)
    assert status.sighting(1) is None
    status.saw(3, now + 1e6)  # again, by a clock that moved: the first sight counts
    assert status.lag_seconds == pytest.approx(20, abs=1)
    status.serves(Served("run", 3, 1, "b" * 64))
    assert (status.lag_seconds, status.sighting(3)) == (0, None)
    status.saw(4, now + 1e6)  # made by a clock that is ahead
    assert status.lag_seconds == 0


class Outputs:
    """An engine's thread that gives one output every ``pause`` seconds."""

    def __init__(self, clock: OutputClock, pauses: list[float]) -> None:
        def run() -> None:
            for i, pause in enumerate(pauses):
                time.sleep(pause)
                clock.returned(i + 1 < len(pauses))

        self.thread = threading.Thread(target=run)
        self.thread.start()


def test_the_gap_is_the_longest_around_the_commit() -> None:
    clock = OutputClock()
    clock.returned(True)
    clock.commit()
    outputs = Outputs(clock, [0.05, 0.01, 0.1, 0.0])
    gap = clock.gap(5.0)
    assert gap is not None
    assert 0.05 <= gap < 0.1, "the third gap is not the commit's"
    outputs.thread.join()


def test_no_gap_while_idle_or_when_nothing_comes() -> None:
    clock = OutputClock()
    clock.commit()
    before = time.monotonic()
    assert clock.gap(5.0) is None
    clock.returned(False)  # the last output of all: whenever the next comes, it was nobody's wait
    time.sleep(0.05)
    clock.commit()
    assert clock.gap(5.0) is None
    assert time.monotonic() - before < 1
    clock.returned(True)
    clock.commit()
    assert clock.gap(0.05) is None  # waited for, but not for ever
    clock.returned(False)
    assert (clock.gap(0.0) or 0) >= 0.05


def test_a_rest_is_taken_only_while_tokens_come(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, rests = OutputClock(), []
    monkeypatch.setattr(time, "sleep", rests.append)
    clock.rest()
    clock.returned(True)
    assert not rests
    clock.rest()
    clock.returned(False)
    clock.rest()
    assert len(rests) == 1 and 0 < rests[0] < 0.05


def test_no_gap_over_the_time_after_an_aborted_request() -> None:
    engine: Any = SimpleNamespace(
        delta_sync=SimpleNamespace(outputs=OutputClock()),
        scheduler=SimpleNamespace(has_unfinished_requests=lambda: left),
    )
    clock, left = engine.delta_sync.outputs, True
    for tokens in (True, False):  # the second as of a prompt's part
        _returned(engine, "1/1", tokens)
    time.sleep(0.01)
    clock.commit()
    _returned(engine, "2/1", True)
    assert (clock.gap(0.0) or 0) >= 0.01
    left = False
    _returned(engine, "2/1", False)  # aborted: what was on its way has no token any more
    before = time.monotonic()
    for _ in range(2):
        clock.commit()
        assert clock.gap(5.0) is None
    left = True
    for _ in range(3):
        _returned(engine, "4/1", True)
    assert clock.gap(0.0) is None
    clock.commit()
    _returned(engine, "5/1", False)
    left = False
    _returned(engine, "5/1", False)  # aborted after the commit: not waited for either
    assert clock.gap(5.0) is None
    assert time.monotonic() - before < 1
