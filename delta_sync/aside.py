"""A call made on a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

T = TypeVar("T")


def aside(call: Callable[[], T], name: str = "delta-sync-aside") -> Future[T]:
    """Begin ``call`` and give its result, or what it raises, later.

    On a daemon, as a store call may never return; it has the priority of the thread that begins it.
    """
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(call())
        except BaseException as error:  # noqa: BLE001 (whoever asks for the result raises it)
            future.set_exception(error)

    threading.Thread(target=work, name=name, daemon=True).start()
    return future
