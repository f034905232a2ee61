"""A run, its trainer and one real server that follows it, for the tests of what clients and operators may ask."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fresh
from helpers import live_memory, slow_steps
from helpers.publish import Publisher, Weights
from helpers.server import VllmServer
from helpers.tiny_models import build

PROMPT = list(range(10, 40))


@dataclass
class Answer:
    """One HTTP answer; ``body``: JSON, or a stream's events."""

    code: int
    headers: Mapping[str, str]
    body: Any


@dataclass
class World:
    """``weights``: every version's, as far as ``step`` published it."""

    folder: Path
    base: Path
    trainer: Publisher
    server: VllmServer
    weights: dict[int, Weights] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """What is served now."""
        return int(self.server.status()["version"])

    def step(self, seed: int, wait: bool = True) -> int:
        """Publish a version that answers otherwise, and wait until it is served."""
        version = self.trainer.step(seed, 0.05).version
        self.weights[version] = {name: bits.copy() for name, bits in self.trainer.weights.items()}
        if wait:
            self.server.wait_version(version)
        return version

    def fresh_greedy(self, version: int, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """What a fresh engine with this version's checkpoint says."""
        llm = fresh.following(self.folder / "no-run")  # follows nothing, but keeps CPU weights plain like the server
        checkpoint = Publisher("memory://saver", self.weights[version]).save(self.folder / f"v{version}", self.base)
        [answers] = fresh.ask(self.folder / f"fresh{version}", checkpoint, llm, prompts, tokens)
        return [answer["tokens"] for answer in answers["answers"]]

    def post(self, path: str, body: Mapping[str, Any] | None = None, key: str | None = None, **headers: str) -> Answer:
        """POST; ``headers`` without their "x-delta-sync-"."""
        named = {f"x-delta-sync-{name.replace('_', '-')}": value for name, value in headers.items()}
        auth = self.server.headers if key is None else {"Authorization": f"Bearer {key}"}
        data = (
            b""
            if body is None
            else json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **body}).encode()
        )
        request = urllib.request.Request(
            f"{self.server.url}{path}", data, {"Content-Type": "application/json", **auth, **named}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as response:
                return Answer(response.status, response.headers, _parsed(response.read()))
        except urllib.error.HTTPError as error:
            return Answer(error.code, error.headers, json.loads(error.read()))

    def complete(self, tokens: int = 8, prompt: Any = PROMPT, **headers: str) -> Answer:
        """One greedy completion."""
        return self.post(
            "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True}, **headers
        )


def _parsed(data: bytes) -> Any:
    if not data.startswith((b"data: ", b"event: ")):
        return json.loads(data)
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]


def span(version: int | None, start: int, end: int) -> dict[str, int | None]:
    """One entry of the usage field."""
    return {"version": version, "epoch": None if version is None else 1, "start": start, "end": end}


@contextmanager
def serve(folder: Path, args: Sequence[str], env: Mapping[str, str] | None = None) -> Iterator[World]:
    """A healthy server that follows a run in which nothing is yet."""
    base = build(folder / "base")
    run = str(folder / "run")
    trainer = Publisher.of_checkpoint(run, base)
    flags, plugins = ("--delta-sync", run, *args), [slow_steps, live_memory]
    with VllmServer(base, folder / "server.log", flags, env, plugins=plugins) as server:
        server.headers = {"Authorization": "Bearer first"}
        yield World(folder, base, trainer, server)
