"""Running functions on the EngineCore's own thread, between two steps, on behalf of the coordinator's thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")
_SLICE = 0.5  # seconds between two looks at the stop event


class EngineBroken(RuntimeError):
    """The ranks may hold different weights, or their replies may be out of step: the engine must end."""


class Stopped(Exception):
    """The engine is shutting down: leave quietly."""


class MainThread:
    """A queue of functions; ``wake`` makes the engine's loop call ``pump`` soon."""

    def __init__(self, stop: threading.Event, wake: Callable[[], None] = lambda: None) -> None:
        self._stop, self._wake = stop, wake
        self._queue: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def run(self, function: Callable[[], T]) -> T:
        """Run ``function`` on the main thread and return its result; Stopped if the engine shuts down first.

        There is no other deadline: the engine may rightly be in a long step, paused or asleep,
        and a function that is already running on all ranks must not be given up half way.
        """
        future: Future[T] = Future()
        self._queue.append((function, future))
        self._wake()
        while True:
            if self._stop.is_set():
                raise Stopped
            try:
                return future.result(timeout=_SLICE)
            except TimeoutError:
                if future.done():  # the function itself raised a TimeoutError
                    raise

    def end(self, error: EngineBroken) -> None:
        """Have the engine's loop end with this error, where it was raised in a call whose errors vLLM only reports."""

        def fail() -> None:
            raise error

        self._queue.append((fail, Future()))
        self._wake()

    def pump(self) -> None:
        """Run everything queued; EngineBroken passes through to the engine's loop and ends it."""
        while self._queue:
            function, future = self._queue.popleft()
            try:
                future.set_result(function())
            except EngineBroken as error:
                future.set_exception(error)
                raise
            except Exception as error:  # noqa: BLE001  # handed to the thread that asked
                future.set_exception(error)
