"""Two engines behind one server: a version counts once both serve it, and an operator's word reaches both."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from serving_world import World, serve

pytestmark = pytest.mark.long
ADMIN = "adm1n-key"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The key comes by the environment here."""
    args = ("--api-key", "first", "--data-parallel-size", "2")
    with serve(tmp_path_factory.mktemp("engines"), args, {"DELTA_SYNC_ADMIN_KEY": ADMIN}) as world:
        world.trainer.origin()
        world.server.wait_version(1)
        yield world


def engines(world: World, what: str) -> list[int | None]:
    return [engine[what] for engine in world.server.status()["engines"]]


def test_requests_wait_until_both_engines_serve_the_version(world: World) -> None:
    publish = threading.Timer(0.5, world.trainer.step, (1, 0.05))
    publish.start()
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda size: world.complete(8, [10] * size, min_version="2"), range(4, 12)))
    assert [(a.code, a.headers["x-delta-sync-version"]) for a in answers] == [(200, "2")] * 8
    publish.join()
    assert engines(world, "version") == [2, 2]


def test_a_rollback_and_a_pin_are_both_engines(world: World) -> None:
    back = world.post("/delta_sync/rollback?version=1", key=ADMIN)
    assert (back.code, engines(world, "version"), engines(world, "pinned")) == (200, [1, 1], [1, 1])
    assert world.complete(version="1").code == 200
    assert world.complete(min_version="2").body["delta_sync"]["reason"] == "pinned"
    assert world.post("/delta_sync/unpin", key=ADMIN).code == 200
    world.server.wait_version(2)
    assert engines(world, "pinned") == [None, None]
