"""Ways to spread a model over processes, each with a real server: commits under streams, and bits equal at the end."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.open_streams import commit_under_streams
from helpers.publish import Publisher
from helpers.server import ServerDied, VllmServer
from helpers.tiny_models import build

from delta_sync.manifest import Manifest

# Rare: beside another test one server did not start in 300 s, and nothing said why.
pytestmark = [pytest.mark.long, pytest.mark.rare]
COMMITS = 5


def followed(tmp_path: Path, architecture: str, *args: str) -> tuple[Publisher, VllmServer]:
    base, run = build(tmp_path / "base", architecture), str(tmp_path / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    config = ("--delta-sync-config", '{"read_back": true}')
    return trainer, VllmServer(base, tmp_path / "server.log", (*args, "--delta-sync", run, *config))


@pytest.mark.parametrize(
    ("architecture", "args", "engines", "ranks"),
    [
        pytest.param("qwen3_moe", ("-tp", "2", "--enable-expert-parallel"), 1, 2, id="experts on two ranks"),
        pytest.param("llama", ("-dp", "2"), 2, 1, id="two engines"),
    ],
)
def test_streams_go_on_over_commits_and_bits_are_equal(
    architecture: str, args: tuple[str, ...], engines: int, ranks: int, tmp_path: Path
) -> None:
    trainer, starting = followed(tmp_path, architecture, *args)
    with starting as server:
        server.wait_version(1)
        made: list[Manifest] = []

        def commit() -> None:
            made.append(trainer.step(len(made), 0.05))
            server.wait_version(made[-1].version)

        commit_under_streams(COMMITS, server, [range(20 + i, 50 + i) for i in range(4)], 1900, commit)
        newest = made[-1]
        assert server.get("/delta_sync/tensors?scan=1")["state_digest"] == newest.state_digest
        status = server.status()
        each = status.get("engines", [status])  # all have scanned
        assert [(e["state"], e["state_digest"], e["commits"], e["ranks"]) for e in each] == [
            ("live", newest.state_digest, len(made), ranks)
        ] * engines
        assert all(engine["audit"]["completed"] for engine in each)
        for name, bits in trainer.weights.items():
            assert server.get_bytes(f"/delta_sync/tensors/{name}")[0] == bits.tobytes(), name


def test_engines_that_share_experts_are_refused_where_vllm_cannot_run_them(tmp_path: Path) -> None:
    _, starting = followed(tmp_path, "qwen3_moe", "-dp", "2", "--enable-expert-parallel")
    with pytest.raises(ServerDied), starting:
        pass
    assert "engines that share experts on a CPU" in starting.text()
    assert "serve it with tensor parallelism" in starting.text()
