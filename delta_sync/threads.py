"""How many threads the codecs use, and running work on them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from delta_sync.errors import FormatError

SETTING = "DELTA_SYNC_THREADS"
MOST = 8  # beyond that memory is the limit
Item = TypeVar("Item")
Result = TypeVar("Result")


def thread_count(most: int = MOST) -> int:
    """What DELTA_SYNC_THREADS says, else half of the cores that this process may use, 1 to ``most``; FormatError."""
    said = os.environ.get(SETTING)
    if said is None:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return min(most, max(1, cores // 2))
    if not said.isdecimal() or not int(said):
        raise FormatError(SETTING, expected="a number of threads from 1", got=repr(said))
    return int(said)


def on_threads(work: Callable[[Item], Result], items: Iterable[Item], threads: int) -> list[Result]:
    """The results of ``work`` in the order of ``items``; the first error is raised once all have ended."""
    todo = list(items)
    if threads == 1 or len(todo) < 2:
        return [work(item) for item in todo]
    with ThreadPoolExecutor(min(threads, len(todo)), "delta-sync-codec") as pool:
        return list(pool.map(work, todo))


def shares(sizes: Iterable[int], parts: int) -> list[slice]:
    """Runs of neighbouring items, at most ``parts``, of about the same size together."""
    ends, total = [], 0
    for size in sizes:
        total += size
        ends.append(total)
    runs, begin = [], 0
    for part in range(1, parts + 1):
        end = begin
        while end < len(ends) and (ends[end] * parts <= total * part or part == parts):
            end += 1
        if end > begin:
            runs.append(slice(begin, end))
        begin = end
    return runs
