"""Two ranks of tensor parallelism, one of which is made to fail at commit: all or none, and serving goes on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from helpers import slow_steps
from helpers.open_streams import OpenStreams
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.tiny_models import build

from delta_sync.context_codec import CONTEXT_CODEC


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As long as this file is there, no commit succeeds."""
    path = tmp_path_factory.mktemp("fault") / "broken"
    path.touch()
    return path


@pytest.fixture(scope="module")
def followed(tmp_path_factory: pytest.TempPathFactory, broken: Path) -> Iterator[tuple[VllmServer, Publisher]]:
    folder = tmp_path_factory.mktemp("tp")
    base, run = build(folder / "base", "llama"), str(folder / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    config = {"read_back": True, "retry": 1.0, "fault": {"rank": 1, "at": "commit", "while": str(broken)}}
    args = ("-tp", "2", "--delta-sync", run, "--delta-sync-config", json.dumps(config))
    with VllmServer(Path(base), folder / "server.log", args, plugins=[slow_steps]) as server:
        yield server, trainer


def read_all(server: VllmServer, trainer: Publisher, version: int) -> dict[str, bytes]:
    """Every tensor put together from both ranks' memory; copies that differ are an error of the route."""
    found = {}
    for name in trainer.weights:
        found[name], headers = server.get_bytes(f"/delta_sync/tensors/{name}")
        assert {k.lower(): v for k, v in headers.items()}["x-version"] == str(version)
    return found


def test_one_failing_rank_takes_both_back_and_streams_go_on(
    followed: tuple[VllmServer, Publisher], broken: Path
) -> None:
    server, trainer = followed
    server.wait_version(1)
    old = {name: bits.tobytes() for name, bits in trainer.weights.items()}
    before = server.complete(range(30, 60), 16)["text"]
    with server.slow_steps():
        streams = OpenStreams(server, [range(20, 50), range(21, 51)], 1900)

        newest = trainer.step(1, 0.05)
        status = server.wait_status("two rollbacks", lambda s: s["rollbacks"] >= 2)
        assert (status["version"], status["state"], status["lag"]) == (1, "live", 1)
        assert "rank 1" in status["last_error"]["error"]
        streams.wait_more()
        assert read_all(server, trainer, 1) == old
        assert server.complete(range(30, 60), 16)["text"] == before
        assert server.status()["version"] == 1

        broken.unlink()
        status = server.wait_version(newest.version)
    assert status["rollbacks"] >= 2 and status["commits"] == 1
    assert read_all(server, trainer, 2) == {name: bits.tobytes() for name, bits in trainer.weights.items()}
    streams.join(crossing=[1])


def test_later_versions_and_anchors_reach_both_ranks(followed: tuple[VllmServer, Publisher]) -> None:
    server, trainer = followed
    bad = trainer.step(2, 0.05, corrupt="content")
    assert server.status()["ranks"] == 2
    status = server.wait_status("refusal", lambda s: s["refusal"])
    assert status["state_digest"] != bad.state_digest
    trainer.anchor(bad)
    assert server.wait_version(bad.version)["state_digest"] == bad.state_digest
    assert read_all(server, trainer, 3) == {name: bits.tobytes() for name, bits in trainer.weights.items()}
    assert server.get("/delta_sync/tensors?scan=1")["state_digest"] == bad.state_digest


def test_each_rank_decodes_its_own_tiles_of_context_coded_deltas(followed: tuple[VllmServer, Publisher]) -> None:
    """Rows of one projection, columns of the next, against live bits that no rank has whole; and a chain of two."""
    server, trainer = followed
    trainer.tiles = 2
    for steps in (1, 2):
        for _ in range(steps):
            small_ones_stepped(trainer)
            newest = trainer.delta()
        assert newest.codec == CONTEXT_CODEC
        status = server.wait_version(newest.version)
        assert status["state_digest"] == newest.state_digest
        assert read_all(server, trainer, newest.version) == {n: bits.tobytes() for n, bits in trainer.weights.items()}


def test_uncut_context_coded_deltas_are_refused_by_name(followed: tuple[VllmServer, Publisher]) -> None:
    server, trainer = followed
    trainer.tiles = 1
    small_ones_stepped(trainer)
    refused = trainer.delta()
    status = server.wait_status("refusal", lambda s: s["refusal"])
    assert status["refusal"]["version"] == refused.version
    assert "tiles" in status["refusal"]["error"]
    assert status["version"] == refused.version - 1


def small_ones_stepped(trainer: Publisher) -> None:
    """Small elements go up by one step, as an optimizer moves them most."""
    for bits in trainer.weights.values():
        bits[(bits >> 7 & 0xFF) < 118] += 1
