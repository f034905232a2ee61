"""Streams that are open at any moment, read by a process of their own: what a test does meanwhile delays no token.

In the test's process four readers took the interpreter so often that publishing a version took seconds, and a server
had given the last tokens of all streams before a test had read them.
"""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

from helpers.stream import Stream, open_stream

if TYPE_CHECKING:
    from helpers.server import VllmServer

_SECONDS = 300.0  # until an answer of the process: streams end meanwhile
_ROUNDS = 5


@dataclass(frozen=True)
class Where:
    """A server as a stream sees it."""

    url: str
    headers: dict[str, str]


class OpenStreams:
    """Streams that are open at any moment until ``join``: where one ends, the next with its prompt begins at once.

    However fast a server is and however long commits take, a commit falls into one of two or more: the first are of
    different lengths, so that they don't end together.
    """

    def __init__(self, server: VllmServer, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._tail = server.tail
        where = Where(server.url, server.headers)
        arguments = (where, [list(prompt) for prompt in prompts], max_tokens, there)
        self._process = context.Process(target=_read_all, args=arguments, daemon=True)
        self._process.start()
        there.close()
        self.ended: list[Stream] = []  # after ``join``
        self._hear()

    @property
    def tokens(self) -> int:
        """Tokens of all of them so far."""
        return int(self._ask("tokens"))

    def wait_more(self, timeout: float = 60.0) -> None:
        """Until tokens come that were not there at the call; AssertionError at the deadline."""
        before, deadline = self.tokens, time.monotonic() + timeout
        while self.tokens == before:
            assert time.monotonic() < deadline, f"no token after {before} in {timeout:g} s"
            time.sleep(0.01)

    def join(self, crossing: Iterable[int] = ()) -> set[int]:
        """Until all have ended; AssertionError unless each is whole, its versions one after the other, and from each of
        ``crossing`` to the version after it a stream goes on. Returns from which versions one does."""
        self.ended = self._ask("join")
        self._process.join(_SECONDS)
        crossed: set[int] = set()
        for stream in self.ended:
            assert (stream.error, stream.tokens) == (None, stream.asked)
            assert stream.finish_reason == "length"
            [spans] = stream.usage["delta_sync"]["choices"]
            versions = [span["version"] for span in spans]
            assert versions == list(range(versions[0], versions[0] + len(versions)))
            crossed.update(versions[:-1])
        assert crossed >= set(crossing), f"streams went on from versions {sorted(crossed)} only"
        return crossed

    def _ask(self, what: str) -> Any:
        self._pipe.send(what)
        return self._hear()

    def _hear(self) -> Any:
        assert self._pipe.poll(_SECONDS), f"no word from the streams within {_SECONDS:g} s"
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise AssertionError(f"{answer}; the server's log ends with\n{self._tail()}")
        return answer


def commit_under_streams(
    count: int, server: VllmServer, prompts: Sequence[Sequence[int]], max_tokens: int, commit: Callable[[], object]
) -> None:
    """Call ``commit`` until ``count`` commits have each fallen into an open stream; AssertionError as ``join``.

    Where the machine lets nobody run for seconds, all streams are answered before a commit: it is not counted, another
    takes its place.
    """
    crossed: set[int] = set()
    for _ in range(_ROUNDS):
        streams = OpenStreams(server, prompts, max_tokens)
        for _ in range(count - len(crossed)):
            commit()
        crossed |= streams.join()
        if len(crossed) >= count:
            return
    raise AssertionError(f"{len(crossed)} of {count} commits fell into a stream, in {_ROUNDS} rounds")


def _read_all(where: Where, prompts: list[list[int]], max_tokens: int, pipe: Connection) -> None:
    try:
        renewed = _Renewed(where, prompts, max_tokens)
        pipe.send("open")
        while pipe.recv() == "tokens":
            pipe.send(renewed.tokens)
        pipe.send(renewed.ended())
    except EOFError:
        return  # the test is over
    except Exception as error:  # noqa: BLE001  the test raises it
        pipe.send(AssertionError(repr(error)))


class _Renewed:
    def __init__(self, where: Where, prompts: list[list[int]], max_tokens: int) -> None:
        self._where, self._max_tokens, self._enough = where, max_tokens, threading.Event()
        count = len(prompts)
        self._all = [open_stream(where, p, max_tokens * (i + 1) // count) for i, p in enumerate(prompts)]
        for stream in self._all:
            stream.wait_tokens(5)
        pairs = zip(prompts, list(self._all), strict=True)
        self._threads = [threading.Thread(target=self._go_on, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    @property
    def tokens(self) -> int:
        return sum(stream.tokens for stream in self._all)

    def ended(self) -> list[Stream]:
        """All streams, once they have ended and none is begun any more."""
        self._enough.set()
        for thread in self._threads:
            thread.join()
        return [replace(stream.join(), _thread=None) for stream in self._all]

    def _go_on(self, prompt: list[int], stream: Stream) -> None:
        while stream.join().error is None and not self._enough.is_set():
            stream = open_stream(self._where, prompt, self._max_tokens)
            self._all.append(stream)
