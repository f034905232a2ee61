"""A gate at which new requests wait while running ones end before a commit."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future


class Gate:
    """Open unless a drain is going on; safe to use from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._closed = False
        self._waiting: list[tuple[float, Future[bool]]] = []

    @property
    def closed(self) -> bool:
        """Whether new requests wait now."""
        return self._closed

    def close(self) -> None:
        """From now on requests wait."""
        with self._lock:
            self._closed = True

    def open(self) -> None:
        """Let all in."""
        with self._lock:
            self._closed = False
            waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            future.set_result(True)

    def enter(self, timeout: float) -> Future[bool]:
        """True once the gate is open, False after ``timeout`` seconds."""
        future: Future[bool] = Future()
        with self._lock:
            if self._closed:
                self._waiting.append((time.monotonic() + timeout, future))
                return future
        future.set_result(True)
        return future

    def expire(self) -> None:
        """Turn away those whose time is over."""
        now = time.monotonic()
        with self._lock:
            late = [future for deadline, future in self._waiting if now >= deadline]
            self._waiting = [(deadline, future) for deadline, future in self._waiting if now < deadline]
        for future in late:
            future.set_result(False)
