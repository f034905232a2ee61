"""An operator holds, takes back, lets go and reloads the version that a real ``vllm serve`` serves."""

from __future__ import annotations

import time
from typing import Any

import pytest
from helpers.stream import open_stream
from serving_world import PROMPT, Answer, World

ADMIN = "adm1n-key"


def order(world: World, action: str, key: str = ADMIN) -> Answer:
    return world.post(f"/delta_sync/{action}", key=key)


def ready(world: World) -> tuple[int, Any]:
    try:
        return 200, world.server.get("/delta_sync/ready")
    except OSError as error:
        return int(error.code), None  # type: ignore[attr-defined]


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


def test_a_replica_too_far_behind_is_not_ready(world: World) -> None:
    assert ready(world)[0] == 200
    bad = world.trainer.step(70, 0.05, corrupt="content")
    world.server.wait_status("a refusal", lambda s: s["refusal"])
    assert ready(world)[0] == 200, "one version behind is allowed here"
    newest = world.trainer.step(71, 0.05)
    world.server.wait_status("lag", lambda s: s["lag"] == 2)
    assert ready(world)[0] == 503
    world.trainer.anchor(newest)
    world.server.wait_version(bad.version + 1)
    assert ready(world) == (200, {"ready": True, "state": "live", "version": newest.version, "lag": 0, "pinned": None})


def test_the_admin_key_is_in_no_log(world: World) -> None:
    assert ADMIN not in world.server.text()
    assert "Traceback" not in world.server.text()
