"""The command line against a real vllm serve: parity of the very weights, and a server held, taken back and let go."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest
from serving_world import World, serve
from typer.testing import CliRunner

from delta_sync.cli.app import app

pytestmark = pytest.mark.long
ADMIN = "the-admin-key"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    folder = tmp_path_factory.mktemp("world")
    with serve(folder, ("--api-key", "first"), {"DELTA_SYNC_ADMIN_KEY": ADMIN}) as world:
        files = {path.name: path.read_bytes() for path in world.base.iterdir()}
        world.trainer.origin(anchor=True, files=files)
        for seed in range(3):
            world.step(seed)
        yield world


@pytest.fixture
def as_json(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DELTA_SYNC_ADMIN_KEY", ADMIN)
    monkeypatch.setenv("VLLM_API_KEY", "first")

    def call(*words: object) -> tuple[int, dict]:
        done = CliRunner().invoke(app, [*map(str, words), "--json"])
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        return done.exit_code, json.loads(done.stdout)

    return call


def test_parity_tells_kernels_from_staleness(world: World, as_json) -> None:
    run = str(world.folder / "run")
    prompts = ("--prompt", "w10 w11 w12", "--prompt", "w20 w21", "--tokens", 48)
    code, same = as_json("parity", run, "--server", world.server.url, "--dtype", "bfloat16", *prompts)
    assert (code, same["version"], same["served_versions"], same["tokens"]) == (0, 4, [4], 96)
    assert same["k3_mean"] < 1e-2 and same["top1"] > 0.5
    stale = world.folder / "stale"
    assert as_json("materialize", f"{run}@2", stale)[0] == 0
    code, old = as_json("parity", stale, "--server", world.server.url, "--dtype", "bfloat16", *prompts)
    assert code == 0 and old["version"] is None
    assert old["k3_mean"] > 10 * same["k3_mean"]
    words = ("parity", stale, "--server", world.server.url, "--fail-above", same["k3_mean"] * 2, *prompts)
    assert as_json(*words)[0] == 1
    code, wrong = as_json("parity", f"{run}@2", "--server", world.server.url, "--timeout", 5, *prompts)
    assert code == 1 and "409" in wrong["error"]["message"]


def test_back_and_on_again(world: World, as_json) -> None:
    url = world.server.url
    code, found = as_json("rollback", "--server", url, "--version", 2, "--yes")
    assert (code, found["servers"][0]["serves"], found["servers"][0]["pinned"]) == (0, 2, 2)
    assert world.version == 2
    code, found = as_json("parity", str(world.folder / "run"), "--server", url, "--dtype", "bfloat16", "--tokens", 16)
    assert (code, found["version"], found["served_versions"]) == (0, 2, [2])
    assert as_json("reload", "--server", url)[0] == 0
    assert as_json("pin", "--server", url, "--version", 3)[1]["servers"][0]["serves"] == 3
    assert as_json("unpin", "--server", url)[0] == 0
    world.server.wait_version(4)
