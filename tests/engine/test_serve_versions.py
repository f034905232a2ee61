"""A real ``vllm serve`` that says which version made which token; running requests are recomputed at a commit.

Recomputed requests have an oracle: from a commit on they go on exactly as a fresh engine of the new version would with
the same tokens before. So a label that is off by one token is seen.
"""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import fresh
import pytest
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.stream import Stream, open_stream
from helpers.tiny_models import build

PROMPT = list(range(10, 40))
SIZES = (30, 12)  # of the streams' prompts
ARGS = ("--api-key", "first", "--api-server-count", "2", "--delta-sync-transition", "recompute")


@dataclass
class World:
    """A run, its trainer, a server that follows it, and every version's checkpoint as far as published."""

    folder: Path
    base: Path
    trainer: Publisher
    server: VllmServer
    checkpoints: dict[int, Path] = field(default_factory=dict)

    def step(self, seed: int) -> int:
        """Publish a version that answers otherwise, and wait until it is served."""
        version = self.trainer.step(seed, 0.05).version
        self.checkpoints[version] = self.trainer.save(self.folder / f"v{version}", self.base)
        self.server.wait_version(version)
        return version

    def fresh_greedy(self, version: int, prompts: list[list[int]], tokens: int) -> list[list[int]]:
        """What a fresh engine with this version's checkpoint says."""
        llm = fresh.following(self.folder / "no-run")  # follows nothing, but keeps CPU weights plain like the server
        [answers] = fresh.ask(self.folder / f"fresh{version}", self.checkpoints[version], llm, prompts, tokens)
        return [answer["tokens"] for answer in answers["answers"]]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("versions")
    base = build(folder / "base")
    run = str(folder / "run")
    trainer = Publisher.of_checkpoint(run, base)
    with VllmServer(base, folder / "server.log", ("--delta-sync", run, *ARGS)) as server:
        server.headers = {"Authorization": "Bearer first"}
        yield World(folder, base, trainer, server)


@dataclass
class Answer:
    """One HTTP answer."""

    code: int
    headers: Mapping[str, str]
    body: Any


def post(world: World, path: str, body: Mapping[str, Any], **headers: str) -> Answer:
    named = {f"x-delta-sync-{name.replace('_', '-')}": value for name, value in headers.items()}
    request = urllib.request.Request(
        f"{world.server.url}{path}",
        json.dumps({"model": "tiny", "temperature": 0, "ignore_eos": True, **body}).encode(),
        {"Content-Type": "application/json", **world.server.headers, **named},
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return Answer(response.status, response.headers, _parsed(response.read()))
    except urllib.error.HTTPError as error:
        return Answer(error.code, error.headers, json.loads(error.read()))


def _parsed(data: bytes) -> Any:
    if not data.startswith(b"data: "):
        return json.loads(data)
    return [json.loads(line[6:]) for line in data.splitlines() if line.startswith(b"data: {")]


def complete(world: World, tokens: int = 8, prompt: Any = PROMPT, **headers: str) -> Answer:
    return post(world, "/v1/completions", {"prompt": prompt, "max_tokens": tokens, "return_token_ids": True}, **headers)


def span(version: int | None, start: int, end: int) -> dict[str, int | None]:
    return {"version": version, "epoch": None if version is None else 1, "start": start, "end": end}


def test_before_the_first_version_tokens_are_of_none(world: World) -> None:
    answer = complete(world)
    assert answer.headers["x-delta-sync-version"] == "none"
    assert answer.body["usage"]["delta_sync"] == {"versions": [None], "choices": [[span(None, 0, 8)]]}
    world.trainer.origin()
    world.server.wait_version(1)
    world.checkpoints[1] = world.base


def test_every_route_says_the_version(world: World) -> None:
    chat = {"messages": [{"role": "user", "content": "w10 w11"}], "max_tokens": 8}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    expected = {"versions": [1], "choices": [[span(1, 0, 8)]]}
    for path, body in (("/v1/completions", {"prompt": PROMPT, "max_tokens": 8}), ("/v1/chat/completions", chat)):
        whole = post(world, path, body)
        assert (whole.headers["x-delta-sync-version"], whole.body["usage"]["delta_sync"]) == ("1", expected)
        stream = post(world, path, {**body, **usage})
        assert stream.headers["x-delta-sync-version"] == "1"
        assert stream.body[-1]["usage"]["delta_sync"] == expected


def test_choices_of_several_prompts_are_told_apart(world: World) -> None:
    body = {"prompt": [PROMPT, PROMPT[:10]], "n": 2, "max_tokens": 8, "temperature": 1.0}
    assert complete_choices(post(world, "/v1/completions", body)) == [[span(1, 0, 8)]] * 4


def complete_choices(answer: Answer) -> Any:
    return answer.body["usage"]["delta_sync"]["choices"]


@pytest.fixture(scope="module")
def streams(world: World) -> list[Stream]:
    """Two streams that three commits fell into."""
    opened = [open_stream(world.server, PROMPT[:size], 900) for size in SIZES]
    for seed in range(3):
        for stream in opened:
            stream.wait_tokens(20 + 100 * seed)
        world.step(seed)
    return [stream.join() for stream in opened]


def spans_of(stream: Stream) -> list[dict[str, int]]:
    return stream.usage["delta_sync"]["choices"][0]


def test_a_stream_goes_on_over_commits_and_says_which_token_is_whose(streams: list[Stream]) -> None:
    for stream in streams:
        spans = spans_of(stream)
        assert (stream.error, stream.tokens) == (None, 900)
        assert [s["version"] for s in spans] == stream.usage["delta_sync"]["versions"] == [1, 2, 3, 4]
        assert [s["start"] for s in spans] == [0, *[s["end"] for s in spans[:-1]]]
        assert spans[-1]["end"] == 900


@pytest.mark.parametrize("version", [3, *(pytest.param(v, marks=pytest.mark.long) for v in (1, 2, 4))])
def test_a_span_is_what_a_fresh_engine_of_its_version_says(world: World, streams: list[Stream], version: int) -> None:
    pieces = []
    for stream, size in zip(streams, SIZES, strict=True):
        [s] = [s for s in spans_of(stream) if s["version"] == version]
        pieces.append((PROMPT[:size] + stream.ids[: s["start"]], stream.ids[s["start"] : s["end"]]))
    longest = max(len(piece) for _, piece in pieces)
    answers = world.fresh_greedy(version, [before for before, _ in pieces], longest)
    for (_, piece), answer in zip(pieces, answers, strict=True):
        assert piece == answer[: len(piece)]


def test_a_request_waits_for_the_version_it_asks_for(world: World) -> None:
    newest = world.server.status()["version"]
    publish = threading.Timer(0.5, world.trainer.step, (20, 0.05))
    publish.start()
    for header in ("min_version", "version"):
        answer = complete(world, **{header: str(newest + 1)})
        assert (answer.code, answer.headers["x-delta-sync-version"]) == (200, str(newest + 1))
    assert complete(world, min_version="1").code == 200
    publish.join()


def test_a_version_that_does_not_come_in_time_is_425(world: World) -> None:
    newest = world.server.status()["version"]
    answer = complete(world, min_version=str(newest + 1), timeout="0.2")
    assert (answer.code, answer.headers["Retry-After"]) == (425, "1")
    facts = {"reason": "not_yet", "wanted": newest + 1, "exact": False, "served": [newest], "newest": newest}
    assert answer.body["delta_sync"] == facts
    assert answer.body["error"]["code"] == 425


def test_a_version_that_is_past_is_409(world: World) -> None:
    answer = complete(world, version="1")
    assert (answer.code, answer.body["delta_sync"]["reason"]) == (409, "passed")


@pytest.mark.parametrize(
    "headers", [{"version": "two"}, {"min_version": "-1"}, {"version": "1", "min_version": "1"}, {"timeout": "never"}]
)
def test_a_header_that_makes_no_sense_is_400(world: World, headers: dict[str, str]) -> None:
    answer = complete(world, **{"version": "1", **headers})
    assert (answer.code, answer.body["delta_sync"]["reason"]) == (400, "bad_header")
    assert "x-delta-sync" in answer.body["error"]["message"]


def test_an_exact_request_is_answered_wholly_by_that_version_or_not_at_all(world: World) -> None:
    version = world.server.status()["version"]
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": PROMPT, "max_tokens": 1900}
        whole = pool.submit(post, world, "/v1/completions", body, version=str(version))
        stream = pool.submit(post, world, "/v1/completions", {**body, "stream": True}, version=str(version))
        witness = open_stream(world.server, PROMPT, 1900)
        witness.wait_tokens(20)
        world.step(21)
        assert (whole.result().code, whole.result().body["delta_sync"]["reason"]) == (409, "changed")
        assert whole.result().body["delta_sync"]["versions"] == [version, version + 1]
        assert stream.result().headers["x-delta-sync-version"] == str(version)
        *chunks, last = stream.result().body
        assert (last["error"]["code"], last["delta_sync"]["reason"]) == (409, "changed")
        assert 20 <= len(chunks) < 1900
    assert witness.tokens < 1900, "both were ended at the commit, not at their last token"
    assert witness.join().error is None


def test_the_server_is_well_after_all_this(world: World) -> None:
    assert complete(world, version=str(world.server.status()["version"])).code == 200
    assert "Traceback" not in world.server.text()
