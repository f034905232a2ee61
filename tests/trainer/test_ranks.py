"""Two real DDP processes: rank 0 publishes, and both go on or stop together."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import bucket
import grpo
import pytest
import tiny
import torch
from helpers.server import free_port
from several_ranks import run_ranks

from trl_callback import DeltaSyncCallback, adapter_team, team_session
from trl_callback.adapter_team import AdapterTeamSession
from trl_callback.config import DeltaSyncConfig
from trl_callback.metrics import Metrics
from trl_callback.session import Subject
from trl_callback.team_session import TeamSession

CHILD = Path(__file__).parent / "ranks_child.py"


def run_two(folder: Path, uri: str, fails_at: str) -> list[str]:
    port = free_port()
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, str(CHILD), str(folder), uri, fails_at],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        outputs = [rank.communicate(timeout=240) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (_, errors) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, errors[-3000:]
    return [out.strip().splitlines()[-1] for out, _ in outputs]


def test_rank_zero_publishes_what_both_trained(tmp_path: Path) -> None:
    uri = str(tmp_path / "bucket")
    assert run_two(tmp_path, uri, "nowhere") == ["rank 0 trained 3", "rank 1 trained 3"]
    covered = [step for m in bucket.chain(uri) for step in range(m.steps[0], m.steps[1] + 1)]
    assert covered == [0, 1, 2, 3]  # each once and in order; a slow disk may put two into one version
    assert {m.epoch for m in bucket.chain(uri)} == {1}
    assert bucket.materialise(uri) == bucket.cast_bytes(torch.load(tmp_path / "final.pt", weights_only=True))


def test_a_failure_on_rank_zero_stops_both(tmp_path: Path) -> None:
    first, second = run_two(tmp_path, str(tmp_path / "bucket"), "step")
    assert first.startswith("rank 0 raised StoreError: injected")
    assert second.startswith("rank 1 raised DeltaSyncError: rank 1, expected every rank to publish")
    assert "a failure on rank 0: StoreError: injected" in second


def test_an_opening_that_takes_its_time_orders_nothing_from_ranks_that_do_not_listen_yet(tmp_path: Path) -> None:
    limits = {"sync_timeout": 1, "publish_timeout": 20, "flush_timeout": 20}
    said = {"folder": str(tmp_path), "settings": limits, "set": {"crew.PING": 0, "team_session.MARGIN": 5}}
    assert run_ranks(2, "team_child.py", said) == ["rank 0 finished", "rank 1 finished"]


def test_at_the_end_all_wait_for_a_file_of_an_anchor_that_rank_zero_is_at(tmp_path: Path) -> None:
    said = {
        "folder": str(tmp_path),
        "settings": {"sync_timeout": 1, "publish_timeout": 30, "flush_timeout": 30, "anchor_every": 1},
        "set": {"team_session.MARGIN": 0.5, "team_session.STOP": 0.2},
        "slow_files": 3,
    }
    assert run_ranks(2, "team_child.py", said) == ["rank 0 finished", "rank 1 finished"]


@pytest.mark.parametrize("wait", [1.0, 5000.0])
def test_ranks_wait_for_each_other_as_long_as_the_trainers_do(wait: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """A mock of the process groups: what counts is the limit that they are made with."""

    class Made(Exception):
        """With this limit."""

    def make(limit: float) -> None:
        raise Made(limit)

    subject = Subject(torch.nn.Linear(2, 2), None, "BF16", 0, ranks_wait=wait)
    config = DeltaSyncConfig.build("memory://x", sync_timeout=10, publish_timeout=20, flush_timeout=30)
    for module, kind in ((team_session, TeamSession), (adapter_team, AdapterTeamSession)):
        monkeypatch.setattr(module, "Team", make)
        with pytest.raises(Made) as made:
            kind(subject, config, None, Metrics())
        assert made.value.args == (max(360.0, wait),)


def test_the_trainers_own_limit_is_taken(tmp_path: Path) -> None:
    sync = DeltaSyncCallback("memory://x")
    grpo.plain_trainer(str(tmp_path), model=tiny.llama(), callbacks=[sync], ddp_timeout=4321)
    assert sync._subject().ranks_wait == 4321
