"""Loops that sleep now and then where somebody is in a hurry beside them."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest

from delta_sync import breath
from delta_sync.aside import Crew, aside
from delta_sync.breath import beside, breathe
from delta_sync.manifest import TensorState, tensors_from_json, tensors_to_json


@pytest.fixture
def rests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(breath, "time", Clock(found))
    monkeypatch.setattr(breath, "_mine", breath._Mine())
    return found


class Clock:
    """Time in which every turn of a loop takes 0.03 ms; ``rests`` are the seconds slept."""

    def __init__(self, rests: list[float]) -> None:
        self.sleep, self._worked = rests.append, 1.0
        self.monotonic = lambda: self._worked

    def thread_time(self) -> float:
        self._worked += 3e-5
        return self._worked


def work(turns: int = 30) -> int:
    for _ in range(turns):
        breathe()
    return turns


def test_a_thread_rests_after_a_tenth_of_a_millisecond_of_work(rests: list[float]) -> None:
    with beside(lambda: True):
        work()
    assert 7 <= len(rests) <= 9 and all(0 < rest < 1e-3 for rest in rests)


def test_long_work_is_interrupted_ever_less(rests: list[float]) -> None:
    with beside(lambda: True):
        work(5000)
    assert 90 < len(rests) < 300, "0.15 s of work, in stretches of 0.1 ms some 1500"
    rests.clear()
    breath._mine.at -= 1.0
    with beside(lambda: True):
        work()
    assert len(rests) >= 7, "other work begins with short stretches"


@pytest.mark.parametrize("block", [lambda: work(), lambda: in_no_hurry()])
def test_where_nobody_is_in_a_hurry_there_is_no_rest(rests: list[float], block: Callable[[], Any]) -> None:
    block()
    with beside(lambda: True):
        pass
    work()
    assert not rests


def in_no_hurry() -> None:
    with beside(lambda: False):
        work()


def in_a_crew(call: Callable[[], int]) -> Future[int]:
    with Crew("test") as crew:
        return crew.begin(call)


@pytest.mark.parametrize("begin", [aside, in_a_crew])
def test_threads_that_work_for_such_a_block_rest_too(
    rests: list[float], begin: Callable[[Callable[[], int]], Future[int]]
) -> None:
    with beside(lambda: True):
        begun = begin(work)
    assert begun.result(10) == 30
    assert len(rests) >= 7
    rests.clear()
    assert begin(work).result(10) == 30
    assert not rests, "what is begun outside does not"


def test_reading_many_tensors_lets_others_in(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {f"layers.{i}.weight": TensorState("BF16", (16, 16), i) for i in range(2000)}
    value, slept = tensors_to_json(tensors), list[float]()
    sleep = time.sleep
    monkeypatch.setattr(time, "sleep", lambda seconds: (slept.append(seconds), sleep(seconds)))
    assert tensors_from_json(value, "these") == tensors
    assert not slept
    with beside(lambda: True):
        assert tensors_from_json(value, "these") == tensors
    assert len(slept) > 2
