"""Labels of batches, spans of requests, wishes, the gate and what a cache keeps: the parts without an engine."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from delta_sync.errors import FormatError
from vllm_delta_plugin.cache_salt import CacheSalt
from vllm_delta_plugin.compat.batches import label_batches
from vllm_delta_plugin.gate import Gate
from vllm_delta_plugin.request_versions import RequestVersions
from vllm_delta_plugin.version_wish import VersionWish
from vllm_delta_plugin.weights_label import LABEL, WeightsLabel


class QueueScheduler:
    """Stands in for vLLM's: batches are scheduled ahead of the outputs of those before, as with async scheduling."""

    def schedule(self) -> Any:
        return SimpleNamespace()

    def has_unfinished_requests(self) -> bool:
        return True

    def update_from_output(self, batch: Any, tokens: dict[str, list[int]]) -> Any:
        outputs = [SimpleNamespace(request_id=r, new_token_ids=t, trace_headers=None) for r, t in tokens.items()]
        outputs[0].trace_headers = {"traceparent": "x"}
        return {0: SimpleNamespace(outputs=outputs)}


def test_a_batch_in_flight_at_a_commit_keeps_the_label_it_left_with() -> None:
    live, returned = ["1/1"], []
    scheduler = QueueScheduler()
    for _ in range(2):  # the second time changes nothing
        label_batches(scheduler, lambda: live[0], lambda label, tokens: returned.append((label, tokens)))
    first, second = scheduler.schedule(), scheduler.schedule()
    live[0] = "2/1"
    third = scheduler.schedule()
    labels = []
    for batch in (first, second, third):
        a, b = scheduler.update_from_output(batch, {"a": [1], "b": []})[0].outputs
        assert b.trace_headers is None, "no token, no label"
        assert a.trace_headers["traceparent"] == "x"
        labels.append(a.trace_headers[LABEL])
    assert labels == ["1/1", "1/1", "2/1"]
    assert returned == [(label, True) for label in labels]
    scheduler.update_from_output(third, {"a": []})
    assert returned[-1] == ("2/1", False)


@pytest.mark.parametrize("label", [WeightsLabel(), WeightsLabel(0, 0), WeightsLabel(7, 2)])
def test_labels_travel(label: WeightsLabel) -> None:
    assert WeightsLabel.decode(label.encode()) == label


def test_spans_join_and_choices_stay_apart() -> None:
    request = RequestVersions()
    assert (request.header, request.to_usage()) == (None, None)
    one, two = request.choice("p0", 0), request.choice("p1", 0)
    assert request.choice("p0", 0) is one
    for choice, version, tokens in ((one, 3, 2), (two, 3, 1), (one, 3, 1), (one, 5, 4), (two, None, 1)):
        choice.add(WeightsLabel(version, version and 1), tokens)
    assert request.header == "3..none"
    usage = request.to_usage()
    assert usage is not None
    assert usage["versions"] == [None, 3, 5]
    assert [[(s["version"], s["start"], s["end"]) for s in choice] for choice in usage["choices"]] == [
        [(3, 0, 3), (5, 3, 7)],
        [(3, 0, 1), (None, 1, 2)],
    ]


@pytest.mark.parametrize(
    ("wish", "good", "bad"),
    [(VersionWish(3, True, 1), [3], [2, 4, None]), (VersionWish(3, False, 1), [3, 4], [2, None])],
)
def test_a_token_that_was_not_asked_for_spoils_the_answer(wish: VersionWish, good: list[int], bad: list[Any]) -> None:
    for version in good:
        request = RequestVersions(wish)
        request.choice("p", 0).add(WeightsLabel(version, 1), 1)
        assert not request.spoiled.is_set()
    for version in bad:
        request = RequestVersions(wish)
        request.choice("p", 0).add(WeightsLabel(version, 1), 1)
        assert request.spoiled.is_set()


@pytest.mark.parametrize("exact", [True, False])
def test_the_same_number_of_another_epoch_is_another_version(exact: bool) -> None:
    request = RequestVersions(VersionWish(8, exact, 1))
    request.choice("p", 0).add(WeightsLabel(8, 1), 2)
    request.choice("p", 1).add(WeightsLabel(8, 1), 2)
    assert not request.spoiled.is_set()
    request.choice("p", 1).add(WeightsLabel(8, 2), 1)
    assert request.spoiled.is_set() == exact
    assert request.header == "8..8"


def test_wishes_are_read_from_headers() -> None:
    assert VersionWish.read({}) is None
    assert VersionWish.read({"x-delta-sync-version": "7"}) == VersionWish(7, True, 30.0)
    headers = {"x-delta-sync-min-version": "7", "x-delta-sync-timeout": "0.5"}
    assert VersionWish.read(headers) == VersionWish(7, False, 0.5)


@pytest.mark.parametrize("value", ["", "-1", "1.5", "\u0663", "x", "9" * 13])
def test_a_version_that_is_no_number_is_refused(value: str) -> None:
    with pytest.raises(FormatError, match="x-delta-sync-version"):
        VersionWish.read({"x-delta-sync-version": value})


@pytest.mark.parametrize("value", ["", "-1", "nan", "inf", "x", "1e9"])
def test_a_timeout_that_is_none_is_refused(value: str) -> None:
    with pytest.raises(FormatError, match="x-delta-sync-timeout"):
        VersionWish.read({"x-delta-sync-version": "1", "x-delta-sync-timeout": value})


def test_the_gate_lets_wait_lets_in_and_turns_away() -> None:
    gate = Gate()
    assert gate.enter(0).result(0) is True
    gate.close()
    hasty, patient = gate.enter(0.01), gate.enter(60)
    time.sleep(0.02)
    gate.expire()
    assert hasty.result(0) is False
    assert not patient.done()
    gate.open()
    assert patient.result(0) is True
    assert gate.enter(0).result(0) is True


def test_what_a_cache_keeps_over_a_commit() -> None:
    salt = CacheSalt()
    assert (salt.current(), salt.current("a")) == (0, 0)
    salt.advance("new_session")
    assert (salt.current(), salt.current("a"), salt.current("b")) == (1, 0, 1)
    salt.advance("all")
    assert (salt.generation, salt.current(), salt.current("a"), salt.current("c")) == (2, 1, 0, 1)
    salt.advance()
    assert (salt.current(), salt.current("a"), salt.current("b")) == (3, 3, 3)


def test_the_session_idle_longest_begins_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_plugin.cache_salt._SESSIONS", 2)
    salt = CacheSalt()
    salt.current("a"), salt.current("b"), salt.current("a")
    salt.advance("new_session")
    salt.current("c")
    assert (salt.current("a"), salt.current("b")) == (0, 1)
