"""Long loops of Python that let others have the interpreter, where somebody is in a hurry beside them.

An engine lets go of the interpreter with every kernel it launches, and beside a loop gets it back after a switch
interval only, which a server sets to 0.1 ms: parsing a manifest of 300 tensors lengthened one turn of 4 ms by 8
(benchmarks/gpu/stage_interference.py). A loop that sleeps before that takes a little of each of several turns instead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_STRETCH, _REST = 1e-4, 5e-4  # seconds
_LONGER = 1.01  # each stretch than the one before: who has 0.15 s of work takes twice as long, not six times
_OVER = 0.1  # seconds without a rest, after which it is other work

_hurried: ContextVar[Callable[[], bool] | None] = ContextVar("delta_sync_beside", default=None)


class _Mine(threading.local):
    """Of each thread: its CPU seconds and the time at its last rest, and how long the stretch until the next may be."""

    worked, at, stretch = 0.0, 0.0, _STRETCH


_mine = _Mine()


@contextmanager
def beside(in_a_hurry: Callable[[], bool]) -> Iterator[None]:
    """Have ``breathe`` sleep in this block, and in what it has other threads do (aside.py), while somebody is so."""
    token = _hurried.set(in_a_hurry)
    try:
        yield
    finally:
        _hurried.reset(token)


def breathe() -> None:
    """For every turn of a loop: sleep half a millisecond if this thread has worked for a tenth of one, later more."""
    hurried = _hurried.get()
    if hurried is None:
        return
    worked = time.thread_time()
    if worked - _mine.worked < _STRETCH:
        return
    if time.monotonic() - _mine.at > _OVER:
        _mine.stretch = _STRETCH
    if worked - _mine.worked >= _mine.stretch:
        if hurried():
            time.sleep(_REST)
        _mine.worked, _mine.at, _mine.stretch = worked, time.monotonic(), _mine.stretch * _LONGER
