"""Streaming clients in processes of their own, so that the publisher's work does not delay the notes of token times."""

from __future__ import annotations

import multiprocessing as mp
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any, Self

from examples.wordle.stream import StreamRecorder

EACH = 16  # streams of a process: about half of one core's time
_SECONDS = 120.0  # until a process's streams all give tokens: it imports what the measuring one has


@dataclass(frozen=True)
class Recorded:
    """What one client saw: unix times of each completion's tokens, and what interrupted it."""

    times: list[list[float]]
    interruptions: list[str]


class Streams:
    """``count`` clients that stream completions from ``url`` until stopped; on entry all give tokens.

    Completions have 1000 to 4000 tokens, each client's another number, so that they don't all begin at once.
    """

    def __init__(self, url: str, count: int) -> None:
        context = mp.get_context("spawn")
        self._children: list[tuple[Any, Connection]] = []
        for first in range(0, count, EACH):
            here, there = context.Pipe()
            numbers = range(first, min(count, first + EACH))
            child = context.Process(target=_record, args=(url, numbers, there), daemon=True)
            self._children.append((child, here))

    def __enter__(self) -> Self:
        for child, _ in self._children:
            child.start()
        try:
            for child, pipe in self._children:
                _heard(child, pipe)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for child, _ in self._children:
            child.kill()

    def stop(self) -> list[Recorded]:
        """End all streams and say what they saw."""
        for _, pipe in self._children:
            pipe.send("stop")
        return [recorded for child, pipe in self._children for recorded in _heard(child, pipe)]


def _heard(child: Any, pipe: Connection) -> Any:
    """What a child says next; TimeoutError, or EOFError if it has ended."""
    if not pipe.poll(_SECONDS):
        raise TimeoutError(f"no word from streaming process {child.pid} within {_SECONDS:g} s")
    return pipe.recv()


def _record(url: str, numbers: range, pipe: Connection) -> None:
    recorders = [StreamRecorder(url, "tiny", f"w{10 + i} w20", 1000 + 47 * i % 3001) for i in numbers]
    for recorder in recorders:
        recorder.__enter__()
    while not all(recorder.tokens for recorder in recorders):
        time.sleep(0.05)
    pipe.send("open")
    pipe.recv()
    for recorder in recorders:
        recorder._stop.set()  # all at once
    for recorder in recorders:
        recorder.stop()
    pipe.send([Recorded([s.times for s in r.streams], r.interruptions) for r in recorders])
    time.sleep(1)
