"""Calls made on threads of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextvars import copy_context
from functools import partial
from queue import SimpleQueue
from typing import Any, Self, TypeVar

T = TypeVar("T")


def aside(call: Callable[[], T], name: str = "delta-sync-aside") -> Future[T]:
    """Begin ``call`` and give its result, or what it raises, later.

    On a daemon, as a store call may never return; it has the priority and the context of the thread that begins it.
    """
    future: Future[T] = Future()
    call = partial(copy_context().run, call)
    threading.Thread(target=_fulfil, args=(future, call), name=name, daemon=True).start()
    return future


class Crew:
    """Like ``aside`` for many calls, on about as many threads as there were calls under way at once; a context manager.

    An engine in the same process waits for the interpreter several times while a thread is started.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._threads = 0
        self._idle = threading.Semaphore(0)  # threads that wait, and for which no call is on its way

    def begin(self, call: Callable[[], T]) -> Future[T]:
        """See ``aside``."""
        future: Future[T] = Future()
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._work, name=self._name, daemon=True).start()
            self._threads += 1
        self._calls.put((future, partial(copy_context().run, call)))
        return future

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Let the threads end once all calls have come to their end, which is not waited for."""
        for _ in range(self._threads):
            self._calls.put(None)

    def _work(self) -> None:
        while (todo := self._calls.get()) is not None:
            _fulfil(*todo)
            del todo  # while waiting it would keep the result
            self._idle.release()


def _fulfil(future: Future[T], call: Callable[[], T]) -> None:
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001 (whoever asks for the result raises it)
        future.set_exception(error)
