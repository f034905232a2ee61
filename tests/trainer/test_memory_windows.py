"""benchmarks/sharded_memory.py counts for a window what was read while it was open, however threads are scheduled."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_what_was_read_before_a_window_does_not_count_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import sharded_memory

    reading, go_on, again = threading.Event(), threading.Event(), threading.Event()
    main = threading.current_thread()

    def anonymous() -> float:
        if threading.current_thread() is main:
            return 10e6
        if reading.is_set():
            again.set()
            return 10e6
        reading.set()  # the sampler has begun to read, of a time when much was held, and is held up
        go_on.wait(10)
        return 500e6

    monkeypatch.setattr(sharded_memory, "anonymous", anonymous)
    memory = sharded_memory.Memory()
    with memory.window("gather"):
        assert reading.wait(10)
    with memory.window("ours"):
        go_on.set()
        assert again.wait(10)
    assert memory.report()["ours"]["peak"] == 0
