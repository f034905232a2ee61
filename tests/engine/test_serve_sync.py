"""A real ``vllm serve`` where running requests end before a commit and new ones wait; what a prompt cache keeps."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from helpers.stream import open_stream
from serving_world import PROMPT, World, serve, span

pytestmark = pytest.mark.long

FEW = ("--num-gpu-blocks-override", "20", "--block-size", "128")  # one request of the longest fits, two don't
ARGS = ("--api-key", "first", "--delta-sync-transition", "sync", "--enable-prompt-tokens-details", *FEW)
LONG = list(range(10, 150))  # 140 tokens; blocks are of 128


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    stored = {"VLLM_ENABLE_RESPONSES_API_STORE": "1"}  # so that responses may go on in the background
    with serve(tmp_path_factory.mktemp("sync"), ARGS, stored) as world:
        yield world


def cached(world: World, session: str | None = None) -> int:
    """How many of a prompt's tokens came from the cache."""
    world.server.headers["X-Session-ID"] = session or ""
    try:
        usage = world.complete(2, LONG).body["usage"]
    finally:
        del world.server.headers["X-Session-ID"]
    return int(usage["prompt_tokens_details"]["cached_tokens"] or 0)


def test_before_the_first_version_tokens_are_of_none(world: World) -> None:
    answer = world.complete()
    assert answer.headers["x-delta-sync-version"] == "none"
    assert answer.body["usage"]["delta_sync"] == {"versions": [None], "choices": [[span(None, 0, 8)]]}
    assert world.complete(min_version="1", timeout="0.2").code == 425
    world.trainer.origin()
    world.server.wait_version(1)


def test_control_is_off_without_an_admin_key(world: World) -> None:
    for action in ("pin", "unpin", "rollback?version=1", "reload"):
        assert world.post(f"/delta_sync/{action}", key="first").code == 404
    assert world.server.status()["pinned"] is None


def test_running_requests_end_on_the_old_weights_and_new_ones_wait(world: World) -> None:
    old = world.step(0)
    alone = world.complete(400).body["choices"][0]["token_ids"]
    world.trainer.change(1, 0.05)
    with ThreadPoolExecutor(1) as pool:
        with world.server.slow_steps():
            stream = open_stream(world.server, PROMPT, 1900)
            stream.wait_tokens(1)
            new = world.trainer.delta().version
            world.server.wait_status("a drain", lambda s: s["draining"])
            patient = pool.submit(world.complete, 8, PROMPT[:20])
            hasty = world.complete(timeout="0.2")
            assert (hasty.code, hasty.headers["Retry-After"]) == (425, "1")
            assert hasty.body["delta_sync"] == {"reason": "draining"}
            assert not patient.done()
            assert stream.tokens < 1900
        assert patient.result().headers["x-delta-sync-version"] == str(new)
    assert stream.join().error is None
    assert stream.usage["delta_sync"]["choices"] == [[span(old, 0, 1900)]]
    assert stream.ids[:400] == alone
    assert world.version == new
    assert world.complete(400).body["choices"][0]["token_ids"] != alone


def test_a_drain_ends_with_what_it_waits_for(world: World) -> None:
    with world.server.slow_steps():
        body = {"input": "w10 w11", "max_output_tokens": 1800, "background": True}
        began = world.post("/v1/responses", body)
        assert (began.code, began.body["status"], began.headers["x-delta-sync-version"]) == (200, "queued", None)
        version = world.trainer.step(5, 0.05).version
        world.server.wait_status("a drain", lambda s: s["draining"])
        cancelled = world.post(f"/v1/responses/{began.body['id']}/cancel", {}, timeout="0.2")
        assert (cancelled.code, cancelled.body["status"]) == (200, "cancelled")
        world.server.wait_version(version)


def test_requests_that_are_preempted_meanwhile_end_on_the_old_weights_too(world: World) -> None:
    old = world.version
    with world.server.slow_steps():
        streams = [open_stream(world.server, PROMPT[size:], 1900) for size in (0, 10)]
        for stream in streams:
            stream.wait_tokens(1)
        new = world.trainer.step(2, 0.05).version
        world.server.wait_status("a drain", lambda s: s["draining"])
    for stream in streams:
        assert stream.join().error is None
        assert stream.usage["delta_sync"]["choices"] == [[span(old, 0, 1900)]]
    world.server.wait_version(new)
    metrics = world.server.get_bytes("/metrics")[0].decode().splitlines()
    assert float(next(line for line in metrics if line.startswith("vllm:num_preemptions_total{")).split()[-1]) > 0


def test_no_request_fails_or_mixes_versions_while_weights_change(world: World) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(world.complete, 60, PROMPT[:size]) for size in range(4, 24)]
        newest = [world.step(10 + i, wait=False) for i in range(3)][-1]
        codes = [answer.result().code for answer in answers]
        versions = [answer.result().body["usage"]["delta_sync"]["versions"] for answer in answers]
    assert codes == [200] * 20
    assert all(len(found) == 1 for found in versions)
    world.server.wait_version(newest)


def test_no_session_finds_older_blocks_by_default(world: World) -> None:
    assert [cached(world, "a") for _ in range(2)] == [0, 128]
    world.step(20)
    assert cached(world, "a") == 0


def test_sessions_that_began_before_may_go_on_and_new_ones_begin_without(world: World) -> None:
    assert (cached(world, "b"), cached(world)) == (128, 128)
    world.trainer.prompt_cache = "new_session"
    world.step(21)
    assert cached(world, "b") == 128
    assert (cached(world, "c"), cached(world)) == (0, 128), "the second finds what the first has just cached"
    world.trainer.prompt_cache = "all"
    world.step(22)
    assert (cached(world, "b"), cached(world, "c"), cached(world, "d"), cached(world)) == (128, 128, 128, 128)
    world.trainer.prompt_cache = "none"
    world.step(23)
    assert cached(world, "b") == 0


def test_the_log_is_clean(world: World) -> None:
    assert "Traceback" not in world.server.text()
