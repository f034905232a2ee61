"""A real ``vllm serve``: which version made which token, asking for one, and an operator who holds or takes one back.

Running requests are recomputed at a commit here, which gives them an oracle: from a commit on they go on exactly as a
fresh engine of the new version would with the same tokens before. So a label that is off by one token is seen.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from helpers.stream import Stream, open_stream
from serving_world import PROMPT, Answer, World, serve, span

ADMIN = "adm1n-key"
ARGS = ("--api-key", "first", "--api-server-count", "2", "--delta-sync-transition", "recompute")
CONTROL = ("--delta-sync-max-lag", "1", "--delta-sync-admin-key", ADMIN)
CAP = ("--delta-sync-config", '{"stage_bytes": 2000000}')  # what three versions need, and not what the whole model does
SIZES = (30, 12)  # of the streams' prompts


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """Two API servers, and two versions to begin with."""
    with serve(tmp_path_factory.mktemp("versions"), (*ARGS, *CONTROL, *CAP)) as world:
        world.trainer.origin()
        world.step(1)
        yield world


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


def test_routes_elsewhere_say_the_version_and_read_wishes_too(world: World) -> None:
    now = world.version
    scored = {"query": "w10", "items": ["w11"], "label_token_ids": [12, 13]}
    for path, body in (("/invocations", {"prompt": PROMPT, "max_tokens": 8}), ("/generative_scoring", scored)):
        answer = world.post(path, body, version=str(now))
        assert (answer.code, answer.headers["x-delta-sync-version"]) == (200, str(now)), answer.body
        refused = world.post(path, body, version=str(now - 1))
        assert (refused.code, refused.body["delta_sync"]["reason"]) == (409, "passed")


def test_a_streamed_response_says_the_version_of_its_first_token(world: World) -> None:
    body = {"input": "w10 w11", "max_output_tokens": 8, "stream": True}
    answer = world.post("/v1/responses", body)
    assert answer.headers["x-delta-sync-version"] == str(world.version)
    assert [event["type"] for event in answer.body[:2]] == ["response.created", "response.in_progress"]
    assert answer.body[-1]["type"] in ("response.completed", "response.incomplete")


def test_choices_of_several_prompts_are_told_apart(world: World) -> None:
    body = {"prompt": [PROMPT, PROMPT[:10]], "n": 2, "max_tokens": 8, "temperature": 1.0}
    assert complete_choices(world.post("/v1/completions", body)) == [[span(world.version, 0, 8)]] * 4


def complete_choices(answer: Answer) -> Any:
    return answer.body["usage"]["delta_sync"]["choices"]


@pytest.fixture(scope="module")
def streams(world: World) -> list[Stream]:
    """Two streams that three commits fell into."""
    with world.server.slow_steps():
        opened = [open_stream(world.server, PROMPT[:size], 1900) for size in SIZES]
        for seed in range(3):
            for stream in opened:
                stream.wait_tokens(20 + 100 * seed)
            world.step(seed)
    return [stream.join() for stream in opened]


def order(world: World, action: str, key: str = ADMIN) -> Answer:
    return world.post(f"/delta_sync/{action}", key=key)


def spans_of(stream: Stream) -> list[dict[str, int]]:
    return stream.usage["delta_sync"]["choices"][0]


def test_a_stream_goes_on_over_commits_and_says_which_token_is_whose(streams: list[Stream]) -> None:
    for stream in streams:
        spans = spans_of(stream)
        first = spans[0]["version"]
        assert (stream.error, stream.tokens) == (None, 1900)
        assert [s["version"] for s in spans] == stream.usage["delta_sync"]["versions"] == [first + i for i in range(4)]
        assert [s["start"] for s in spans] == [0, *[s["end"] for s in spans[:-1]]]
        assert spans[-1]["end"] == 1900


def piece_of(stream: Stream, size: int, number: int) -> tuple[int, list[int], list[int]]:
    """A span's version, all tokens before it, and its own."""
    s = spans_of(stream)[number]
    return s["version"], PROMPT[:size] + stream.ids[: s["start"]], stream.ids[s["start"] : s["end"]]


def test_a_span_is_what_its_version_says_when_it_is_back(world: World, streams: list[Stream]) -> None:
    for number in (2, 1, 0):
        for stream, size in zip(streams, SIZES, strict=True):
            version, before, piece = piece_of(stream, size, number)
            if world.version != version:
                assert order(world, f"rollback?version={version}").code == 200
            assert world.complete(len(piece), before).body["choices"][0]["token_ids"] == piece
    assert order(world, "unpin").code == 200
    world.server.wait_version(spans_of(streams[0])[-1]["version"])


@pytest.mark.long
@pytest.mark.parametrize("number", range(4))
def test_a_span_is_what_a_fresh_engine_of_its_version_says(world: World, streams: list[Stream], number: int) -> None:
    pieces = [piece_of(stream, size, number) for stream, size in zip(streams, SIZES, strict=True)]
    longest = max(len(piece) for _, _, piece in pieces)
    answers = world.fresh_greedy(pieces[0][0], [before for _, before, _ in pieces], longest)
    for (_, _, piece), answer in zip(pieces, answers, strict=True):
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
    with ThreadPoolExecutor(2) as pool, world.server.slow_steps():
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
        assert 0 < len(chunks) < 1900
        assert witness.tokens < 1900, "both were ended at the commit, not at their last token"
    assert witness.join().error is None


@pytest.mark.parametrize("action", ["pin", "unpin", "rollback?version=1", "reload"])
def test_control_asks_for_the_admin_key(world: World, action: str) -> None:
    for key in ("first", "wrong", ""):
        assert order(world, action, key).code == 401
    assert world.server.status()["pinned"] is None


def test_the_admin_key_may_also_look(world: World) -> None:
    assert world.post("/delta_sync/hint", key=ADMIN).code == 200


def test_a_pinned_replica_stays_and_an_unpinned_one_follows(world: World) -> None:
    held = world.server.status()["version"]
    pinned = order(world, "pin")
    assert (pinned.code, pinned.body["pinned"], pinned.body["version"]) == (200, held, held)
    newest = [world.step(51 + i, wait=False) for i in range(3)][-1]
    world.server.wait_status("the newest", lambda s: s["newest_version"] == newest)
    time.sleep(0.5)
    status = world.server.status()
    assert (status["version"], status["pinned"], status["lag"], status["ready"]) == (held, held, 3, True)
    started = time.monotonic()
    refused = world.complete(min_version=str(newest))
    assert (refused.code, refused.body["delta_sync"]["reason"]) == (409, "pinned")
    assert time.monotonic() - started < 10, "nobody waits for what will not come"
    assert world.complete(version=str(held)).code == 200
    moved = order(world, f"pin?version={held + 1}")
    assert (moved.code, moved.body["version"], moved.body["pinned"]) == (200, held + 1, held + 1)
    assert order(world, f"pin?version={held}").code == 409, "only a rollback goes back"
    assert order(world, f"pin?version={newest + 5}").code == 409
    assert order(world, "unpin").code == 200
    assert world.server.wait_version(newest)["pinned"] is None


def test_a_rollback_undoes_the_deltas_under_open_streams_and_is_proven(world: World) -> None:
    before = world.server.status()
    old, answer = before["version"], world.complete(24).body["choices"][0]["token_ids"]
    newest = [world.step(60 + i) for i in range(2)][-1]
    other = world.complete(24).body["choices"][0]["token_ids"]
    assert other != answer
    with world.server.slow_steps():
        stream = open_stream(world.server, PROMPT, 1500)
        stream.wait_tokens(20)
        back = order(world, f"rollback?version={old}")
    assert (back.code, back.body["version"], back.body["pinned"]) == (200, old, old)
    assert (back.body["state_digest"], back.body["anchors_taken"]) == (before["state_digest"], before["anchors_taken"])
    assert world.server.get("/delta_sync/tensors?scan=1")["state_digest"] == before["state_digest"]
    assert world.complete(24).body["choices"][0]["token_ids"] == answer
    assert back.body["newest_version"] == newest
    assert order(world, f"rollback?version={newest}").code == 409
    assert order(world, "rollback").code == 400
    assert order(world, "unpin").code == 200
    world.server.wait_version(newest)
    assert world.complete(24).body["choices"][0]["token_ids"] == other
    assert stream.join().error is None
    assert stream.usage["delta_sync"]["choices"][0][1]["version"] == old


def test_reload_takes_everything_from_an_anchor_and_proves_it(world: World) -> None:
    assert order(world, "reload").code == 409, "there is no anchor"
    newest = world.trainer.writer.head
    assert newest is not None
    world.trainer.anchor(newest)
    before = world.server.status()
    after = order(world, "reload")
    assert (after.code, after.body["version"]) == (200, newest.version)
    assert after.body["anchors_taken"] == before["anchors_taken"] + 1
    assert after.body["audit"]["completed"] > before["audit"]["completed"]
    assert after.body["state_digest"] == newest.state_digest


def good(version: int) -> dict[str, Any]:
    """What the readiness probe says of a server that has the newest version."""
    return {"ready": True, "state": "live", "version": version, "lag": 0, "pinned": None}


def test_a_replica_too_far_behind_is_not_ready(world: World) -> None:
    assert world.server.ready()[0] == 200
    bad = world.trainer.step(70, 0.05, corrupt="content")
    world.server.wait_status("a refusal", lambda s: s["refusal"])
    assert world.server.ready()[0] == 200, "one version behind is allowed here"
    newest = world.trainer.step(71, 0.05)
    world.server.wait_status("lag", lambda s: s["lag"] == 2)
    assert world.server.ready()[0] == 503
    world.trainer.anchor(newest)
    world.server.wait_version(bad.version + 1)
    assert world.server.ready() == (200, good(newest.version))


def test_an_anchor_above_the_cap_is_loaded_while_the_server_is_unready_and_paused(world: World) -> None:
    before = world.server.status()
    old = before["version"]
    world.trainer.change(80, 1.0)
    new = world.trainer.delta()
    status = world.server.wait_status("a refusal", lambda s: s["refusal"])
    assert (status["state"], status["version"], world.server.ready()[0]) == ("refused", old, 200)
    assert status["refusal"]["kind"] == "StageTooLargeError"
    with ThreadPoolExecutor(2) as pool, world.server.held_load():
        with world.server.slow_steps():
            stream = open_stream(world.server, PROMPT, 400)
            stream.wait_tokens(20)
            world.trainer.anchor(new)
            world.server.wait_status("a load", lambda s: s["state"] == "poisoned")
        stand_still(stream)
        assert 20 <= stream.tokens < 400
        code, told = world.server.ready()
        assert (code, told["ready"], told["state"], told["version"]) == (503, False, "poisoned", None)
        waiting = [pool.submit(world.complete, 8), pool.submit(world.complete, 8, min_version=str(new.version))]
        hasty = world.complete(min_version=str(new.version), timeout="0.2")
        assert (hasty.code, hasty.body["delta_sync"]["reason"]) == (425, "not_yet")
        assert not any(answer.done() for answer in waiting)
        assert stand_still(stream) < 400
    after = world.server.wait_version(new.version)
    assert world.server.ready() == (200, good(new.version))
    assert (after["state_digest"], after["anchors_taken"]) == (new.state_digest, before["anchors_taken"] + 1)
    assert world.server.get("/delta_sync/tensors?scan=1")["state_digest"] == new.state_digest
    assert f"serving version {new.version} (loaded from its anchor, paused for" in world.server.text()
    for answer in waiting:
        assert (answer.result().code, answer.result().headers["x-delta-sync-version"]) == (200, str(new.version))
    assert (stream.join().error, stream.tokens) == (None, 400)
    assert [span["version"] for span in spans_of(stream)] == [old, new.version]


def stand_still(stream: Stream) -> int:
    """Return the number of tokens once none has come for half a second; AssertionError if they go on for ten."""
    for _ in range(20):
        before = stream.tokens
        time.sleep(0.5)
        if stream.tokens == before:
            return before
    raise AssertionError(f"tokens go on: {before}, then {stream.tokens}")


def test_the_admin_key_is_in_no_log(world: World) -> None:
    assert ADMIN not in world.server.text()
    assert "Traceback" not in world.server.text()
