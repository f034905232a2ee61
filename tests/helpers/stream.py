"""A streaming completion in a thread: what arrived, when, and how it ended."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from helpers.server import VllmServer


@dataclass
class Stream:
    """Start with ``open_stream``; ``tokens`` grows while it runs; ``error`` stays None if it ended by itself."""

    asked: int = 0
    ids: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    error: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    _thread: threading.Thread | None = None

    @property
    def tokens(self) -> int:
        """Tokens so far; a busy server sends several in one chunk."""
        return len(self.ids)

    @property
    def ended(self) -> bool:
        """Whether nothing more will come."""
        return self._thread is not None and not self._thread.is_alive()

    @property
    def longest_gap(self) -> float:
        """Seconds between two chunks, at most."""
        return max((b - a for a, b in zip(self.times, self.times[1:], strict=False)), default=0.0)

    def wait_tokens(self, count: int, timeout: float = 60.0) -> None:
        """Until ``count`` tokens arrived; AssertionError at the deadline or if the stream ended before."""
        deadline = time.monotonic() + timeout
        while self.tokens < count:
            if self.ended and self.tokens < count:
                raise AssertionError(f"stream ended after {self.tokens} of {count} tokens: {self.error}")
            if time.monotonic() > deadline:
                raise AssertionError(f"{self.tokens} of {count} tokens after {timeout:g} s")
            time.sleep(0.01)

    def join(self, timeout: float = 120.0) -> Stream:
        """Until the stream has ended; AssertionError at the deadline."""
        if self._thread is not None:
            self._thread.join(timeout)
            if self._thread.is_alive():
                raise AssertionError(f"stream still open after {timeout:g} s, {self.tokens} tokens")
        return self


class OpenStreams:
    """Streams that are open at any moment until ``join``: where one ends, the next with its prompt begins at once.

    However fast a server is and however long commits take, each commit falls into one of two or more: the first are of
    different lengths, so that they don't end together.
    """

    def __init__(self, server: VllmServer, prompts: Sequence[Sequence[int]], max_tokens: int) -> None:
        self._server, self._max_tokens, self._enough = server, max_tokens, threading.Event()
        count = len(prompts)
        self._all = [open_stream(server, p, max_tokens * (i + 1) // count) for i, p in enumerate(prompts)]
        for stream in self._all:
            stream.wait_tokens(5)
        pairs = zip(prompts, list(self._all), strict=True)
        self._threads = [threading.Thread(target=self._go_on, args=pair, daemon=True) for pair in pairs]
        for thread in self._threads:
            thread.start()

    @property
    def tokens(self) -> int:
        """Tokens of all of them so far."""
        return sum(stream.tokens for stream in self._all)

    def wait_more(self, timeout: float = 60.0) -> None:
        """Until tokens come that were not there at the call; AssertionError at the deadline."""
        before, deadline = self.tokens, time.monotonic() + timeout
        while self.tokens == before:
            assert time.monotonic() < deadline, f"no token after {before} in {timeout:g} s"
            time.sleep(0.01)

    def join(self, crossing: Iterable[int] = ()) -> None:
        """Until all have ended; AssertionError unless each is whole, its versions one after the other, and from each of
        ``crossing`` to the version after it at least one stream goes on."""
        self._enough.set()
        for thread in self._threads:
            thread.join()
        crossed: set[int] = set()
        for stream in self._all:
            assert (stream.join().error, stream.tokens) == (None, stream.asked)
            assert stream.finish_reason == "length"
            [spans] = stream.usage["delta_sync"]["choices"]
            versions = [span["version"] for span in spans]
            assert versions == list(range(versions[0], versions[0] + len(versions)))
            crossed.update(versions[:-1])
        assert crossed >= set(crossing), f"streams went on from versions {sorted(crossed)} only"

    def _go_on(self, prompt: Sequence[int], stream: Stream) -> None:
        while stream.join().error is None and not self._enough.is_set():
            stream = open_stream(self._server, prompt, self._max_tokens)
            self._all.append(stream)


def open_stream(server: VllmServer, prompt: Sequence[int], max_tokens: int, **more: Any) -> Stream:
    """Begin a greedy streaming completion of exactly ``max_tokens`` tokens."""
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
    body |= {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}}
    request = urllib.request.Request(
        f"{server.url}/v1/completions",
        json.dumps({**body, **more}).encode(),
        {"Content-Type": "application/json", **server.headers},
    )
    stream = Stream(max_tokens)
    stream._thread = threading.Thread(target=_read, args=(stream, request), daemon=True)
    stream._thread.start()
    return stream


def _read(stream: Stream, request: urllib.request.Request) -> None:
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            for line in response:
                if line.startswith(b"data: {"):
                    _take(stream, json.loads(line[6:]))
    except Exception as error:  # noqa: BLE001  # the test that opened the stream judges it
        stream.error = repr(error)


def _take(stream: Stream, chunk: dict[str, Any]) -> None:
    if "error" in chunk:
        stream.error = str(chunk["error"])
        return
    stream.usage = chunk.get("usage") or stream.usage
    for choice in chunk["choices"]:
        if ids := choice.get("token_ids"):
            stream.ids.extend(ids)
            stream.times.append(time.monotonic())
        stream.finish_reason = choice["finish_reason"] or stream.finish_reason
