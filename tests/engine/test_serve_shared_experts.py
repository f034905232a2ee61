"""Two engines that share experts behind one real server: every version at one forward pass, streams open meanwhile."""

from __future__ import annotations

import urllib.error
from itertools import count
from pathlib import Path

import psutil
import pytest
from helpers import cpu_exchange, slow_steps
from helpers.open_streams import commit_under_streams
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.stream import open_stream
from helpers.tiny_models import build

pytestmark = pytest.mark.long
COMMITS = 5
TOKENS = 1500
EXPERT = "model.layers.0.mlp.experts.0.up_proj.weight"


def followed(folder: Path, *args: str) -> tuple[Publisher, VllmServer]:
    base, run = build(folder / "base", "qwen3_moe"), str(folder / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    args = ("--data-parallel-size", "2", *args, "--delta-sync", run, "--delta-sync-config", '{"read_back": true}')
    return trainer, VllmServer(base, folder / "server.log", args, plugins=[cpu_exchange, slow_steps])


def test_streams_go_on_and_both_engines_commit_at_one_pass(tmp_path: Path) -> None:
    trainer, starting = followed(tmp_path, "--enable-expert-parallel")
    with starting as server:
        server.wait_version(1)
        seeds, prompts = count(), [[20 + i] * 30 for i in range(4)]
        commit_under_streams(COMMITS, server, prompts, TOKENS, lambda: _take(trainer, server, next(seeds)))
        _take(trainer, server, next(seeds))  # idle: woken for it
        for name, bits in trainer.weights.items():
            assert _held(server, name) == {bits.tobytes()}, name
        assert _engines_with(server, EXPERT) == [0]
        _kill_one_engine(server)


@pytest.mark.rare
def test_without_expert_parallelism_every_expert_is_cut_over_the_engines(tmp_path: Path) -> None:
    trainer, starting = followed(tmp_path)
    with starting as server:
        server.wait_version(1)
        with server.slow_steps():
            stream = open_stream(server, [20] * 30, TOKENS)
            stream.wait_tokens(5)
            for seed in range(COMMITS):
                _take(trainer, server, seed)
        assert (stream.join().error, stream.tokens) == (None, TOKENS)
        with pytest.raises(urllib.error.HTTPError, match="404"):  # each engine holds a part of it
            server.get_bytes(f"/delta_sync/tensors/{EXPERT}")


def _held(server: VllmServer, name: str) -> set[bytes]:
    """What the engines that hold all of a tensor have of it."""
    return {server.get_bytes(f"/delta_sync/tensors/{name}?engine={n}")[0] for n in _engines_with(server, name)}


def _engines_with(server: VllmServer, name: str) -> list[int]:
    holding = []
    for number in range(2):
        try:
            server.get_bytes(f"/delta_sync/tensors/{name}?engine={number}")
        except urllib.error.HTTPError as error:
            assert error.code == 404
        else:
            holding.append(number)
    return holding


def _take(trainer: Publisher, server: VllmServer, seed: int) -> None:
    """Publish, wait for it, and have each engine read all its live memory."""
    newest = trainer.step(seed, 0.05)
    server.wait_version(newest.version)
    before = [engine["audit"]["completed"] for engine in server.status()["engines"]]
    assert server.get("/delta_sync/tensors?scan=1")["state_digest"] == newest.state_digest
    each = server.status()["engines"]
    assert [(e["state"], e["state_digest"], e["commits"], e["rollbacks"], e["ranks"]) for e in each] == [
        ("live", newest.state_digest, newest.version - 1, 0, 2)
    ] * 2
    assert [engine["audit"]["last_ok_version"] for engine in each] == [newest.version] * 2
    assert all(engine["audit"]["completed"] > count for engine, count in zip(each, before, strict=True))
    assert each[0]["group"]["step"] == each[1]["group"]["step"] is not None


def _kill_one_engine(server: VllmServer) -> None:
    """The others can't go on without it: vLLM ends the server, and nobody is left waiting."""
    children = psutil.Process(server.pid).children(recursive=True)
    [engine] = [process for process in children if "EngineCore_DP1" in " ".join([process.name(), *process.cmdline()])]
    with server.slow_steps():
        streams = [open_stream(server, [20 + i] * 30, TOKENS) for i in range(2)]
        for stream in streams:
            stream.wait_tokens(5)
        engine.kill()
        psutil.Process(server.pid).wait(90)
    for stream in streams:
        assert stream.join(120).finish_reason in (None, "abort", "error")
