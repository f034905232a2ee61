"""A streaming completion in a thread: what arrived, when, and how it ended."""

from __future__ import annotations

import json
import threading
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from helpers.open_streams import Where
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


def open_stream(server: VllmServer | Where, prompt: Sequence[int], max_tokens: int, **more: Any) -> Stream:
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
