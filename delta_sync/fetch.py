"""Objects of a chain, fetched and decoded ahead of whoever stages them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, TypeVar

from delta_sync.manifest import ObjectRef

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

AHEAD = 4  # objects on their way, or waiting to be taken, at once
AHEAD_BYTES = 64 * 1024**2  # and so many bytes of them, coded; one object may be larger

T = TypeVar("T")


def fetch(
    ledger: Ledger, refs: Sequence[ObjectRef], then: Callable[[bytes], T], most_bytes: int = AHEAD_BYTES
) -> Iterator[T]:
    """``then`` of every object's bytes, in order, done on the thread that fetched them.

    Raises what ``Ledger.read_object`` and ``then`` raise, at the object it is about. A caller that stops early leaves
    what runs to come to its end unheeded.
    """
    coming: deque[tuple[ObjectRef, Future[T]]] = deque()
    for ref in refs:
        while coming and (len(coming) == AHEAD or ref.size + sum(other.size for other, _ in coming) > most_bytes):
            yield coming.popleft()[1].result()
        coming.append((ref, _begin(ledger, ref, then)))
    while coming:
        yield coming.popleft()[1].result()


def _begin(ledger: Ledger, ref: ObjectRef, then: Callable[[bytes], T]) -> Future[T]:
    future: Future[T] = Future()

    def work() -> None:
        try:
            future.set_result(then(ledger.read_object(ref)))
        except BaseException as error:  # noqa: BLE001 (whoever takes the object raises it)
            future.set_exception(error)

    # Daemons, as a store call may never return; they have the priority of the thread that begins them.
    threading.Thread(target=work, name="delta-sync-fetch", daemon=True).start()
    return future
