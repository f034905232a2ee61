"""Calls on a crew's threads: side by side, each thread used again, none kept waiting by one that never returns."""

from __future__ import annotations

import gc
import threading
import time
import weakref

import pytest

from delta_sync.aside import Crew


def threads(name: str) -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == name]


def test_calls_run_side_by_side_and_one_after_the_other_needs_one_thread() -> None:
    both = threading.Barrier(2)
    with Crew("crew-of-two") as crew:
        pair = [crew.begin(lambda: both.wait(10)) for _ in range(2)]  # neither returns before the other has begun
        assert sorted(one.result(10) for one in pair) == [0, 1]
        seen = set()
        for _ in range(20):
            deadline = time.monotonic() + 10
            while crew._idle._value < 2 and time.monotonic() < deadline:  # both wait for work again
                time.sleep(0.001)
            seen.add(crew.begin(threading.get_ident).result(10))
        assert len(seen) <= 2 and len(threads("crew-of-two")) == 2
    deadline = time.monotonic() + 10
    while threads("crew-of-two"):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_error_is_raised_where_the_result_is_asked_for_and_ends_no_thread() -> None:
    with Crew("crew-error") as crew:
        failed = crew.begin(lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            failed.result(10)
        assert crew.begin(lambda: 5).result(10) == 5


def test_a_call_that_does_not_return_holds_up_nobody() -> None:
    stuck = threading.Event()
    with Crew("crew-stuck") as crew:
        crew.begin(stuck.wait)
        assert crew.begin(lambda: 5).result(10) == 5
    assert threads("crew-stuck") and all(thread.daemon for thread in threads("crew-stuck"))
    stuck.set()


def test_a_thread_that_waits_keeps_no_result() -> None:
    class Large:
        pass

    with Crew("crew-large") as crew:
        future = crew.begin(Large)
        seen = weakref.ref(future.result(10))
        del future
        deadline = time.monotonic() + 10
        while seen() is not None:
            gc.collect()
            assert time.monotonic() < deadline
            time.sleep(0.01)
