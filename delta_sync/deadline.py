"""A bound on calls that have none of their own: a file system that hangs, a server that drips."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class StillRunningError(Exception):
    """The call did not end in time; its thread, a daemon, is left behind and may yet end."""

    def __init__(self, thread: threading.Thread) -> None:
        super().__init__(thread.name)
        self.thread = thread


def within(seconds: float, call: Callable[[], Result]) -> Result:
    """What ``call`` returns or raises, run in a thread of its own; StillRunningError after ``seconds``."""
    results: list[Result] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 (raised in the caller's thread)
            errors.append(error)

    thread = threading.Thread(target=run, name="delta-sync-call", daemon=True)
    thread.start()
    thread.join(max(0.0, seconds))
    if results:
        return results[0]
    if errors:
        raise errors[0]
    raise StillRunningError(thread)
