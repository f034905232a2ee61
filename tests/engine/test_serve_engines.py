"""Two engines behind one server: a version counts once both serve it, and an operator's word reaches both."""

from __future__ import annotations

import threading
import urllib.error
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_world import World, serve

pytestmark = pytest.mark.long
ADMIN = "adm1n-key"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The key comes by the environment here."""
    settings = '{"read_back": true, "replica": "box"}'
    args = ("--api-key", "first", "--data-parallel-size", "2", "--delta-sync-config", settings)
    with serve(tmp_path_factory.mktemp("engines"), args, {"DELTA_SYNC_ADMIN_KEY": ADMIN}) as world:
        world.trainer.origin()
        world.server.wait_version(1)
        yield world


def engines(world: World, what: str) -> list[int | None]:
    return [engine[what] for engine in world.server.status()["engines"]]


def test_each_engine_has_a_name_of_its_own(world: World) -> None:
    assert engines(world, "replica") == ["box-dp0", "box-dp1"]


def test_requests_wait_until_both_engines_serve_the_version(world: World) -> None:
    publish = threading.Timer(0.5, world.trainer.step, (1, 0.05))
    publish.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda size: world.complete(8, [10] * size, min_version="2"), range(4, 12)))
    assert [(a.code, a.headers["x-delta-sync-version"]) for a in answers] == [(200, "2")] * 8
    publish.join()
    assert engines(world, "version") == [2, 2]


def test_what_is_asked_of_both_engines_says_whose_answer_it_is(world: World) -> None:
    newest = world.trainer.writer.head
    world.server.wait_version(newest.version)
    found = world.server.get("/delta_sync/tensors?scan=1")
    assert found["engine"] in (0, 1)
    assert found["engines"] == [{"version": newest.version, "state_digest": newest.state_digest}] * 2
    assert all(audit["completed"] for audit in engines(world, "audit")), "both have scanned"
    name = min(found["tensors"])
    for engine in (0, 1):
        data, headers = world.server.get_bytes(f"/delta_sync/tensors/{name}?engine={engine}")
        assert data == world.trainer.weights[name].tobytes()
        assert (headers["x-engine"], headers["x-engines"]) == (str(engine), "2")
    with pytest.raises(urllib.error.HTTPError, match="404"):
        world.server.get_bytes(f"/delta_sync/tensors/{name}?engine=2")


def test_what_one_engine_cannot_do_none_does(world: World) -> None:
    refused = world.post("/delta_sync/rollback?version=99", key=ADMIN)
    assert refused.code == 409
    assert "engine 0: version 99" in refused.body["error"] and "nothing was done" in refused.body["error"]
    assert engines(world, "pinned") == [None, None]


def test_a_rollback_and_a_pin_are_both_engines(world: World) -> None:
    back = world.post("/delta_sync/rollback?version=1", key=ADMIN)
    assert (back.code, engines(world, "version"), engines(world, "pinned")) == (200, [1, 1], [1, 1])
    assert world.complete(version="1").code == 200
    assert world.complete(min_version="2").body["delta_sync"]["reason"] == "pinned"
    assert world.post("/delta_sync/unpin", key=ADMIN).code == 200
    world.server.wait_version(2)
    assert engines(world, "pinned") == [None, None]
