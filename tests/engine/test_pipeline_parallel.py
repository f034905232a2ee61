"""Two pipeline stages behind one real server: batches are under way in both while a version is committed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from helpers import slow_steps
from helpers.open_streams import OpenStreams, commit_under_streams
from helpers.publish import Publisher
from helpers.server import SMALL, VllmServer
from helpers.tiny_models import build

pytestmark = pytest.mark.long
COMMITS = 50
COMPILED = tuple(option for option in SMALL if option != "--enforce-eager")  # without, vLLM's stages fail on a CPU


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """While this file is there, the second stage fails half way through its commit."""
    return tmp_path_factory.mktemp("fault") / "broken"


@pytest.fixture(scope="module", params=["llama", pytest.param("qwen3_moe", marks=pytest.mark.rare)])
def followed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, broken: Path
) -> Iterator[tuple[VllmServer, Publisher]]:
    folder = tmp_path_factory.mktemp("pp")
    base, run = build(folder / "base", request.param), str(folder / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    config = {"read_back": True, "retry": 1.0, "fault": {"rank": 1, "at": "commit_half", "while": str(broken)}}
    args = ("-pp", "2", "--delta-sync", run, "--delta-sync-config", json.dumps(config))
    with VllmServer(base, folder / "server.log", args, base=COMPILED, plugins=[slow_steps]) as server:
        server.wait_version(1)
        yield server, trainer


def check(server: VllmServer, trainer: Publisher, version: int) -> None:
    """Both stages hold this version, every bit, and a scan of all memory says so too."""
    for name, bits in trainer.weights.items():
        data, headers = server.get_bytes(f"/delta_sync/tensors/{name}")
        assert {k.lower(): v for k, v in headers.items()}["x-version"] == str(version)
        assert data == bits.tobytes(), name
    assert server.get("/delta_sync/tensors?scan=1")["state_digest"] == server.status()["state_digest"]
    assert server.status()["ranks"] == 2


def test_fifty_commits_under_streams(followed: tuple[VllmServer, Publisher]) -> None:
    server, trainer = followed
    seeds = count()

    def commit() -> None:
        newest = trainer.step(next(seeds), 0.05)
        assert server.wait_version(newest.version)["state_digest"] == newest.state_digest

    commit_under_streams(COMMITS, server, [range(20 + i, 50 + i) for i in range(4)], 1900, commit)
    done = next(seeds)
    check(server, trainer, done + 1)
    status = server.status()
    assert (status["commits"], status["rollbacks"], status["refusals"]) == (done, 0, 0)


def test_a_stage_that_fails_takes_both_back(followed: tuple[VllmServer, Publisher], broken: Path) -> None:
    server, trainer = followed
    before, old = server.complete(range(30, 60), 16)["text"], server.status()
    with server.slow_steps():
        streams = OpenStreams(server, [range(20, 50), range(21, 51)], 1900)
        broken.touch()
        newest = trainer.step(1000, 0.05)
        status = server.wait_status("two rollbacks", lambda s: s["rollbacks"] >= 2)
        assert (status["version"], status["state"]) == (old["version"], "live")
        assert "rank 1" in status["last_error"]["error"]
        streams.wait_more()
        assert server.complete(range(30, 60), 16)["text"] == before
        broken.unlink()
        server.wait_version(newest.version)
    streams.join(crossing=[old["version"]])
    check(server, trainer, newest.version)
