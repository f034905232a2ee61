"""Clients that wait for a version: the coordinator's thread resolves them, another one sees to their deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass
class _Waiter:
    version: int | None  # None: whatever is newest once the coordinator has looked
    deadline: float
    future: Future[dict[str, Any]]


class Waiters:
    """Futures of status dictionaries, with an added "reached" flag."""

    def __init__(self) -> None:
        self._waiters: list[_Waiter] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, version: int | None, timeout: float) -> Future[dict[str, Any]]:
        """A future that is done when ``version`` is served, or after ``timeout`` seconds."""
        waiter = _Waiter(version, time.monotonic() + timeout, Future())
        with self._lock:
            self._waiters.append(waiter)
        return waiter.future

    def needs_newest(self) -> bool:
        """True if somebody waits for the newest version and it was not looked up for them yet."""
        return any(w.version is None for w in self._waiters)

    def set_newest(self, version: int) -> None:
        """The newest version is this: 0 if there is none, which any state satisfies."""
        for waiter in self._waiters:
            if waiter.version is None:
                waiter.version = version

    def resolve(self, served: int | None, status: Callable[[], dict[str, Any]]) -> None:
        """Finish every waiter whose version is served or whose time is over."""
        self._finish(lambda waiter: waiter.version is not None and (served or 0) >= waiter.version, status)

    def expire(self, status: Callable[[], dict[str, Any]]) -> None:
        """Finish every waiter whose time is over, however long the coordinator's thread is held up."""
        self._finish(lambda waiter: False, status)

    def _finish(self, has_reached: Callable[[_Waiter], bool], status: Callable[[], dict[str, Any]]) -> None:
        now = time.monotonic()
        with self._lock:
            for waiter in list(self._waiters):
                reached = has_reached(waiter)
                if reached or now >= waiter.deadline:
                    self._waiters.remove(waiter)
                    waiter.future.set_result({**status(), "reached": reached, "wanted_version": waiter.version})
