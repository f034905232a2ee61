"""What is still to be done once the main thread has ended, be it by an exception or by Ctrl-C."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress

Call = Callable[[], object]

_calls: list[Call] = []


def at_exit(call: Call) -> None:
    """Have ``call`` made when the interpreter begins to exit, while threads and thread pools still work."""
    _calls.append(call)


def not_at_exit(call: Call) -> None:
    """Take it back."""
    with suppress(ValueError):
        _calls.remove(call)


def _make_calls() -> None:
    """The newest first, as atexit does; Ctrl-C in one of them leaves out the rest."""
    while _calls:
        _calls.pop()()


# ``atexit`` comes too late: thread pools, as stores use them, take no more work by then. They themselves are told by
# way of this function, which Python does not document.
getattr(threading, "_register_atexit", atexit.register)(_make_calls)
