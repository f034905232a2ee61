"""A real `vllm serve --quantization` that follows a bf16 run: what clients and operators see is as without it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving_world import World, serve

pytestmark = pytest.mark.long
ADMIN = "adm1n-key"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    args = ("--quantization", "fp8_per_channel", "--api-key", "first", "--delta-sync-config", '{"read_back": true}')
    with serve(tmp_path_factory.mktemp("fp8"), args, {"DELTA_SYNC_ADMIN_KEY": ADMIN}) as world:
        world.trainer.origin()
        world.server.wait_version(1)
        yield world


def said(world: World) -> list[int]:
    [choice] = world.complete(16).body["choices"]
    return list(choice["token_ids"])


def test_versions_are_the_trainers_and_a_way_back_is_a_way_back(world: World) -> None:
    first = said(world)
    version = world.step(1)
    newest = world.trainer.writer.head
    answer = world.complete()
    assert (answer.code, answer.headers["x-delta-sync-version"]) == (200, str(version))
    second = said(world)
    assert second != first
    found = world.server.get("/delta_sync/tensors?scan=1")
    assert (found["version"], found["state_digest"]) == (newest.version, newest.state_digest)

    assert world.post("/delta_sync/rollback?version=1", key=ADMIN).code == 200
    assert said(world) == first
    assert world.post("/delta_sync/unpin", key=ADMIN).code == 200
    world.server.wait_version(version)
    assert said(world) == second


def test_what_can_be_read_back_is_the_checkpoints_and_the_status_says_what_is_kept(world: World) -> None:
    newest = world.trainer.writer.head
    world.server.wait_version(newest.version)
    status = world.server.status()
    layers = sum(bits.nbytes for name, bits in world.trainer.weights.items() if "_proj" in name)
    assert status["shadow_bytes"] == layers
    name = next(name for name in world.trainer.weights if "q_proj" in name)
    data, headers = world.server.get_bytes(f"/delta_sync/tensors/{name}")
    assert (data, headers["x-dtype"]) == (world.trainer.weights[name].tobytes(), "BF16")


def test_reload_takes_complete_weights(world: World) -> None:
    before = said(world)
    world.trainer.anchor(world.trainer.writer.head)
    assert world.post("/delta_sync/reload", key=ADMIN).code == 200
    status = world.server.status()
    assert (status["state"], status["anchors_taken"]) == ("live", 1)
    assert said(world) == before
