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

_hurried: ContextVar[Callable[[], bool] | None] = ContextVar("delta_sync_beside", default=None)
_mine = threading.local()


@contextmanager
def beside(in_a_hurry: Callable[[], bool]) -> Iterator[None]:
    """Have ``breathe`` sleep in this block, and in what it has other threads do (aside.py), while somebody is so."""
    token = _hurried.set(in_a_hurry)
    try:
        yield
    finally:
        _hurried.reset(token)


def breathe() -> None:
    """For every turn of a loop: sleep half a millisecond if this thread has worked for a tenth of one."""
    hurried = _hurried.get()
    if hurried is None:
        return
    worked = time.thread_time()
    if worked - getattr(_mine, "since", 0.0) > _STRETCH:
        if hurried():
            time.sleep(_REST)
        _mine.since = worked
