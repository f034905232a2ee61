"""Objects of a chain, fetched ahead of whoever decodes them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from delta_sync.manifest import ObjectRef

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

AHEAD = 4  # objects on their way, or waiting to be taken, at once
AHEAD_BYTES = 512 * 1024**2  # and so many bytes of them; one object may be larger


def fetch(ledger: Ledger, refs: Sequence[ObjectRef], most_bytes: int = AHEAD_BYTES) -> Iterator[bytes]:
    """Every object's bytes, checked, in order; raises what ``Ledger.read_object`` raises, at the object it is about.

    A caller that stops early leaves downloads to come to their end unheeded.
    """
    coming: deque[tuple[ObjectRef, Future[bytes]]] = deque()
    for ref in refs:
        while coming and (len(coming) == AHEAD or ref.size + sum(other.size for other, _ in coming) > most_bytes):
            yield coming.popleft()[1].result()
        coming.append((ref, _begin(ledger, ref)))
    while coming:
        yield coming.popleft()[1].result()


def _begin(ledger: Ledger, ref: ObjectRef) -> Future[bytes]:
    future: Future[bytes] = Future()

    def work() -> None:
        try:
            future.set_result(ledger.read_object(ref))
        except BaseException as error:  # noqa: BLE001 (whoever takes the object raises it)
            future.set_exception(error)

    threading.Thread(target=work, name="delta-sync-fetch", daemon=True).start()
    return future
