"""One piece of work in a low-priority thread that the worker's RPC methods poll."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Generic, TypeVar

from delta_sync.at_exit import at_exit, not_at_exit
from delta_sync.breath import beside

T = TypeVar("T")
_STRETCH, _REST = 2.5e-4, 1e-3  # seconds
STAGING, AUDITING = 5, 10  # niceness; higher starves behind a busy forward pass, worst while holding the GIL
_SWITCH = 1e-4  # seconds
_LAST = 5.0  # seconds that a process which exits waits for the work to end


class Cancelled(Exception):
    """The work was dropped while it ran."""


class Job(Generic[T]):
    """Runs ``work(job)`` in a thread; ``result`` or ``error`` is set once ``running`` is false.

    It ``began`` and ``ended`` at these unix times, the second with a result.
    """

    def __init__(self, name: str, niceness: int, work: Callable[[Job[T]], T]) -> None:
        self.object: str | None = None  # the stored object that is being read, for the error report
        self.result: T | None = None
        self.error: Exception | None = None
        self.began, self.ended = time.time(), 0.0
        self._cancelled = threading.Event()
        self._work, self._niceness = work, niceness
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        at_exit(self._leave)
        self._thread.start()

    @property
    def running(self) -> bool:
        """Whether neither result nor error is there yet."""
        return self.result is None and self.error is None

    def reading(self, key: str | None) -> None:
        """Note which object is being read; Cancelled if the job was dropped."""
        self.object = key
        self.check()

    def check(self) -> None:
        """Cancelled if the job was dropped."""
        if self._cancelled.is_set():
            raise Cancelled

    def cancel(self) -> None:
        """Ask the thread to end at its next check; its result is not wanted any more."""
        self._cancelled.set()

    def _run(self) -> None:
        try:
            _lower_priority(self._niceness)
            with beside(lambda: self._niceness > 0):  # the engine is paused for what is not nice
                result = self._work(self)
            self.ended = time.time()
            self.result = result
        except Exception as error:  # noqa: BLE001 - kept, and reported by the poll
            self.error = error
        finally:
            not_at_exit(self._leave)

    def _leave(self) -> None:
        """Python ends threads that are left where they are; inside one of torch's calls that aborts the process."""
        self.cancel()
        self._thread.join(_LAST)


class Pace:
    """Call it in loops of a background thread that are Python's: it sleeps now and then.

    The engine's thread lets go of the interpreter at every kernel it launches, and would get it back only after a
    whole switch interval (5 ms) while such a loop runs.
    """

    def __init__(self) -> None:
        self._since = time.perf_counter()

    def __call__(self) -> None:
        """Sleep a millisecond if a quarter of one has gone by since the last sleep."""
        if time.perf_counter() - self._since > _STRETCH:
            time.sleep(_REST)
            self._since = time.perf_counter()


def share_interpreter() -> None:
    """Let a thread that waits for the interpreter have it after 0.1 ms, not after Python's 5, in all of this process.

    The engine's thread waits for it after every kernel. Beside stages of a small model on a CPU the longest of its
    turns took 2.9 and 3.1 ms instead of 8.2 and 5.8 (benchmarks/gpu/stage_interference.py).
    """
    sys.setswitchinterval(min(sys.getswitchinterval(), _SWITCH))


def _lower_priority(niceness: int) -> None:
    """Let the forward pass go first: on Linux priorities are a thread's, not the process's."""
    if not hasattr(os, "setpriority"):
        return
    thread = threading.get_native_id()
    if niceness > os.getpriority(os.PRIO_PROCESS, thread):  # a server may be started with less; more needs a right
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, thread, niceness)


def describe(error: Exception, key: str | None = None) -> dict[str, Any]:
    """An error as the engine reads it: kind, what to do, message, the stored object it is about."""
    kind = type(error).__name__
    return {"kind": kind, "action": getattr(error, "action", "fail"), "error": str(error) or kind, "object": key}
