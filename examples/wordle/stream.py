"""A client that keeps one long completion streaming and notes when each token came."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

import httpx

from delta_sync.event_lines import event_lines

NATURAL_ENDS = ("stop", "length")
_LONGEST = 1 << 20  # bytes of an event
STALL = 120.0  # seconds without a token after which a stream counts as interrupted


@dataclass
class Stream:
    """One completion: unix time of each chunk that carried text, and how it ended ("" while open, "cut" by us)."""

    times: list[float] = field(default_factory=list)
    end: str = ""


class StreamRecorder:
    """Streams from /v1/completions in a thread, one completion after the other, until stopped.

    A stream that ends other than by its length or an end-of-sequence token, or that stalls, is an interruption.
    """

    def __init__(self, url: str, model: str, prompt: str, max_tokens: int, api_key: str | None = None) -> None:
        self._url = f"{url}/v1/completions"
        self._body = {
            "model": model,
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,  # as long as the context allows, so that several commits fall into each stream
            "stream": True,
        }
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="stream", daemon=True)
        self.streams: list[Stream] = []
        self.interruptions: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End the open stream; returns once its thread has."""
        self._stop.set()
        self._thread.join(timeout=STALL)

    @property
    def tokens(self) -> int:
        return sum(len(stream.times) for stream in self.streams)

    def _run(self) -> None:
        with httpx.Client(timeout=httpx.Timeout(STALL), trust_env=False) as client:
            while not self._stop.is_set():
                self.streams.append(Stream())
                try:
                    self._follow(client, self.streams[-1])
                except Exception as error:  # noqa: BLE001  # what is no event, say: whatever ended it interrupted it
                    self._interrupted(f"{type(error).__name__}: {error}")
                    self._stop.wait(1.0)

    def _follow(self, client: httpx.Client, stream: Stream) -> None:
        with client.stream("POST", self._url, json=self._body, headers=self._headers) as response:
            if response.status_code != 200:
                self._interrupted(f"HTTP {response.status_code}: {response.read().decode(errors='replace')[:300]}")
                self._stop.wait(1.0)
                return
            for event in _events(response):
                if self._stop.is_set():
                    stream.end = "cut"
                    return
                self._take(event, stream)
        if stream.end not in NATURAL_ENDS:
            self._interrupted(f"ended with {stream.end or 'no'} finish reason after {len(stream.times)} tokens")

    def _take(self, event: dict[str, Any], stream: Stream) -> None:
        if "error" in event:
            stream.end = f"error {event['error']}"
        for choice in event.get("choices", ()):
            if choice.get("text"):
                stream.times.append(time.time())
            stream.end = choice.get("finish_reason") or stream.end

    def _interrupted(self, why: str) -> None:
        self.streams[-1].end = self.streams[-1].end or "interrupted"
        self.interruptions.append(why)


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    for line in event_lines(response.iter_bytes(), _LONGEST):
        if line.startswith("data:") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data:"))
