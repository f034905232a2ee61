"""Objects of a chain, fetched and decoded ahead of whoever stages them."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from delta_sync.aside import Crew
from delta_sync.manifest import ObjectRef
from delta_sync.threads import thread_count

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

AHEAD = max(4, min(16, os.cpu_count() or 1))  # objects on their way, or waiting to be taken, at once
AHEAD_BYTES = 64 * 1024**2  # and so many bytes of them, coded; one object may be larger
# Threads that work on bytes: with more of them an engine beside them waits longer (benchmarks/gpu/README.md).
AT_WORK = 4
# Seconds between the begins of two: a thread that begins wants the interpreter often, and an engine in this process is
# one among all who do. Beside 16 objects a turn of 0.85 ms took 8 on a CPU, with this pause 2.1 (benchmarks/gpu).
BETWEEN = 1e-3


T = TypeVar("T")


def fetch(
    ledger: Ledger, refs: Sequence[ObjectRef], then: Callable[[bytes], T], most_bytes: int = AHEAD_BYTES
) -> Generator[T, None, None]:
    """``then`` of every object's bytes, in order, on the threads that fetch them, a few at a time.

    With more than there are cores for nothing is done sooner, and an engine in the same process waits for them. Raises
    what ``Ledger.read_object`` and ``then`` raise, at the object it is about. A caller that stops early leaves what
    runs to come to its end unheeded.
    """
    coming: deque[tuple[ObjectRef, Future[T]]] = deque()
    at_work = threading.Semaphore(thread_count(AT_WORK))
    with Crew("delta-sync-fetch") as crew:
        for ref in refs:
            while coming and (len(coming) == AHEAD or ref.size + sum(other.size for other, _ in coming) > most_bytes):
                yield coming.popleft()[1].result()
            coming.append((ref, crew.begin(partial(_take, ledger, ref, then, at_work))))
            time.sleep(BETWEEN)
        while coming:
            yield coming.popleft()[1].result()


def _take(ledger: Ledger, ref: ObjectRef, then: Callable[[bytes], T], at_work: threading.Semaphore) -> T:
    data = ledger.read_object(ref)
    with at_work:
        return then(data)
