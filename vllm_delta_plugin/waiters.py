"""Clients that wait for a version: the coordinator's thread resolves them, another one sees to their deadlines."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any


@dataclass
class Waiter:
    """One client."""

    version: int | None  # None: whatever is newest once the coordinator has looked
    deadline: float
    future: Future[dict[str, Any]]


class Waiters:
    """Futures of status dictionaries, with an added "reached" flag."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []
        self._lock = threading.Lock()

    def __bool__(self) -> bool:
        return bool(self._waiters)

    def add(self, version: int | None, timeout: float) -> Future[dict[str, Any]]:
        """A future that is done when ``version`` is served, or after ``timeout`` seconds."""
        waiter = Waiter(version, time.monotonic() + timeout, Future())
        with self._lock:
            self._waiters.append(waiter)
        return waiter.future

    def for_newest(self) -> list[Waiter]:
        """Those who wait for the newest version, which was not looked up for them yet."""
        with self._lock:
            return [waiter for waiter in self._waiters if waiter.version is None]

    def wait_for(self, version: int, waiters: Sequence[Waiter]) -> None:
        """The newest version, looked up since they came, is this one: 0 if there is none, which any state satisfies."""
        for waiter in waiters:
            waiter.version = version

    def resolve(self, served: int | None, pinned: int | None, status: Callable[[], dict[str, Any]]) -> None:
        """Finish every waiter whose version is served, or above the one that is pinned, or whose time is over."""

        def is_above_pin(waiter: Waiter) -> bool:
            return pinned is not None and waiter.version is not None and waiter.version > pinned

        self._finish(
            lambda waiter: waiter.version is not None and (served or 0) >= waiter.version, is_above_pin, status
        )

    def expire(self, status: Callable[[], dict[str, Any]]) -> None:
        """Finish every waiter whose time is over, however long the coordinator's thread is held up."""
        self._finish(lambda waiter: False, lambda waiter: False, status)

    def _finish(
        self,
        has_reached: Callable[[Waiter], bool],
        is_in_vain: Callable[[Waiter], bool],
        status: Callable[[], dict[str, Any]],
    ) -> None:
        now = time.monotonic()
        with self._lock:
            for waiter in list(self._waiters):
                reached = has_reached(waiter)
                if reached or is_in_vain(waiter) or now >= waiter.deadline:
                    self._waiters.remove(waiter)
                    waiter.future.set_result({**status(), "reached": reached, "wanted_version": waiter.version})
