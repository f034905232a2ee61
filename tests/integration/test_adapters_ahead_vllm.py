"""Two real ``vllm serve --enable-lora`` roll out ahead of a trainer whose versions are adapters."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpo_run
import pytest
from helpers import tiny_models
from helpers.server import VllmServer

from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback

peft = pytest.importorskip("peft", reason="PEFT is not installed (extra peft)")
pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 6


def at_version(servers: list[VllmServer], version: int, timeout: float = 60) -> list[dict[str, Any]]:
    """What all servers say once they serve it: training waits for none of them at its end."""
    deadline = time.monotonic() + timeout
    while True:
        statuses = [server.status() for server in servers]
        if all(status["version"] == version for status in statuses):
            return statuses
        assert time.monotonic() < deadline, statuses
        time.sleep(0.1)


def test_ahead_of_two_real_servers_with_adapters(tmp_path: Path) -> None:
    checkpoint, bucket = tiny_models.build(tmp_path / "model", "qwen3"), str(tmp_path / "bucket")
    flags = ["--enable-lora", "--max-lora-rank", "8", "--max-loras", "2", "--delta-sync", bucket]
    with ExitStack() as stack:
        servers = [stack.enter_context(VllmServer(checkpoint, tmp_path / f"{n}.log", flags)) for n in range(2)]
        sync = DeltaSyncCallback(bucket, server_url=[server.url for server in servers], sync_timeout=120.0,
                                 fleet_patience=60.0, lora="adapter", rollouts_ahead=1, max_staleness=1)  # fmt: skip
        settings = peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM")
        trainer = grpo_run.trainer_of(
            checkpoint, servers[0].url, sync, steps=STEPS, learning_rate=3e-3, per_device_train_batch_size=16,
            peft_config=settings,
        )  # fmt: skip
        trainer.train()
        sync.close()
        newest = Ledger(open_store(bucket)).head()
        assert newest is not None and newest.steps[1] == STEPS
        statuses = at_version(servers, newest.version)
    records = list(sync.rollouts.batches)
    assert [(record.step, record.ahead) for record in records] == [(step, step > 0) for step in range(STEPS)]
    assert sync.rollouts.staleness.keys() <= {0, 1} and sync.rollouts.staleness.total() == 16 * STEPS
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["sampling/sampling_logp_difference/mean"] < 0.1 for entry in logs)
    assert [status["adapter"] for status in statuses] == [newest.objects[0].sha256] * 2
    assert [status["anchors_taken"] for status in statuses] == [0, 0]
    assert [status["state"] for status in statuses] == ["live", "live"]
    assert all("POST /v1/completions" in (tmp_path / f"{n}.log").read_text() for n in range(2)), "both were asked"
