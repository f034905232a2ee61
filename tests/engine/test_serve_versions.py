"""A real ``vllm serve`` that says which version made which token; running requests are recomputed at a commit.

Recomputed requests have an oracle: from a commit on they go on exactly as a fresh engine of the new version would with
the same tokens before. So a label that is off by one token is seen.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.stream import Stream, open_stream
from serving_world import PROMPT, Answer, World, span

SIZES = (30, 12)  # of the streams' prompts


def test_every_route_says_the_version(world: World) -> None:
    chat = {"messages": [{"role": "user", "content": "w10 w11"}], "max_tokens": 8}
    usage = {"stream": True, "stream_options": {"include_usage": True}}
    now = world.version
    expected = {"versions": [now], "choices": [[span(now, 0, 8)]]}
    for path, body in (("/v1/completions", {"prompt": PROMPT, "max_tokens": 8}), ("/v1/chat/completions", chat)):
        whole = world.post(path, body)
        assert (whole.headers["x-delta-sync-version"], whole.body["usage"]["delta_sync"]) == (str(now), expected)
        stream = world.post(path, {**body, **usage})
        assert stream.headers["x-delta-sync-version"] == str(now)
        assert stream.body[-1]["usage"]["delta_sync"] == expected


def test_choices_of_several_prompts_are_told_apart(world: World) -> None:
    body = {"prompt": [PROMPT, PROMPT[:10]], "n": 2, "max_tokens": 8, "temperature": 1.0}
    assert complete_choices(world.post("/v1/completions", body)) == [[span(world.version, 0, 8)]] * 4


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
        first = spans[0]["version"]
        assert (stream.error, stream.tokens) == (None, 900)
        assert [s["version"] for s in spans] == stream.usage["delta_sync"]["versions"] == [first + i for i in range(4)]
        assert [s["start"] for s in spans] == [0, *[s["end"] for s in spans[:-1]]]
        assert spans[-1]["end"] == 900


@pytest.mark.parametrize("number", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (0, 1, 3))])
def test_a_span_is_what_a_fresh_engine_of_its_version_says(world: World, streams: list[Stream], number: int) -> None:
    pieces = []
    for stream, size in zip(streams, SIZES, strict=True):
        s = spans_of(stream)[number]
        pieces.append((PROMPT[:size] + stream.ids[: s["start"]], stream.ids[s["start"] : s["end"]]))
    longest = max(len(piece) for _, piece in pieces)
    answers = world.fresh_greedy(s["version"], [before for before, _ in pieces], longest)
    for (_, piece), answer in zip(pieces, answers, strict=True):
        assert piece == answer[: len(piece)]


def test_a_request_waits_for_the_version_it_asks_for(world: World) -> None:
    newest = world.version
    publish = threading.Timer(0.5, world.trainer.step, (20, 0.05))
    publish.start()
    for header in ("min_version", "version"):
        answer = world.complete(**{header: str(newest + 1)})
        assert (answer.code, answer.headers["x-delta-sync-version"]) == (200, str(newest + 1))
    assert world.complete(min_version="1").code == 200
    publish.join()


def test_a_version_that_does_not_come_in_time_is_425(world: World) -> None:
    newest = world.version
    answer = world.complete(min_version=str(newest + 1), timeout="0.2")
    assert (answer.code, answer.headers["Retry-After"]) == (425, "1")
    facts = {"reason": "not_yet", "wanted": newest + 1, "exact": False, "served": [newest], "newest": newest}
    assert answer.body["delta_sync"] == facts
    assert answer.body["error"]["code"] == 425


def test_a_version_that_is_past_is_409(world: World) -> None:
    answer = world.complete(version=str(world.version - 1))
    assert (answer.code, answer.body["delta_sync"]["reason"]) == (409, "passed")


@pytest.mark.parametrize(
    "headers", [{"version": "two"}, {"min_version": "-1"}, {"version": "1", "min_version": "1"}, {"timeout": "never"}]
)
def test_a_header_that_makes_no_sense_is_400(world: World, headers: dict[str, str]) -> None:
    answer = world.complete(**{"version": str(world.version), **headers})
    assert (answer.code, answer.body["delta_sync"]["reason"]) == (400, "bad_header")
    assert "x-delta-sync" in answer.body["error"]["message"]


def test_an_exact_request_is_answered_wholly_by_that_version_or_not_at_all(world: World) -> None:
    version = world.version
    with ThreadPoolExecutor(2) as pool:
        body = {"prompt": PROMPT, "max_tokens": 1900}
        whole = pool.submit(world.post, "/v1/completions", body, version=str(version))
        stream = pool.submit(world.post, "/v1/completions", {**body, "stream": True}, version=str(version))
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
    assert world.complete(version=str(world.version)).code == 200
    assert "Traceback" not in world.server.text()
