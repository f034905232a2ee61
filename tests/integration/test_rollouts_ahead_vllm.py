"""Rollouts that run ahead on a real ``vllm serve``: their versions, their log-probabilities, and that they end."""

from __future__ import annotations

import re
import time
from pathlib import Path
from typing import Any

import grpo_run
import pytest
from helpers import slow_steps, tiny_models
from helpers.server import VllmServer
from transformers import TrainerCallback

from trl_callback import DeltaSyncCallback

pytestmark = [pytest.mark.timeout(900), pytest.mark.long]
STEPS = 6


class Interrupt(TrainerCallback):
    """Ctrl-C in the second optimizer step, while a batch of long completions runs ahead."""

    def __init__(self, server: VllmServer) -> None:
        self.server, self.trainer = server, None

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        generation = self.trainer.vllm_generation  # type: ignore[attr-defined]
        generation.max_completion_length, generation.generation_kwargs = 1800, {"ignore_eos": True}

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            wait_for(lambda: running(self.server) > 0)
            raise KeyboardInterrupt


def running(server: VllmServer) -> int:
    """Requests that the engine works on, or will."""
    text = server.get_bytes("/metrics")[0].decode()
    counts = re.findall(r"^vllm:num_requests_(?:running|waiting)\{[^}]*\} ([\d.]+)$", text, re.M)
    assert len(counts) >= 2
    return int(sum(map(float, counts)))


def wait_for(done: Any, timeout: float = 60) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ahead_of_a_real_server(tmp_path: Path) -> None:
    tiny_models.build(tmp_path / "model", "qwen3")
    bucket = str(tmp_path / "bucket")
    settings: dict[str, Any] = {"sync_timeout": 120.0, "rollouts_ahead": 1, "max_staleness": 1}
    args = ["--delta-sync", bucket]
    with VllmServer(tmp_path / "model", tmp_path / "server.log", args, plugins=[slow_steps]) as server:
        sync = DeltaSyncCallback(bucket, **settings)
        trainer = grpo_run.trainer_of(tmp_path / "model", server.url, sync, steps=STEPS)
        trainer.train()
        sync.close()
        records = list(sync.rollouts.batches)
        assert [(record.step, record.ahead) for record in records] == [(step, step > 0) for step in range(STEPS)]
        assert sync.rollouts.staleness.total() == 4 * STEPS
        assert sync.rollouts.staleness.keys() <= {0, 1}
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        first, *ahead = (entry["sampling/sampling_logp_difference/mean"] for entry in logs)
        assert first < 0.02  # by the same weights, here and there
        assert max(ahead) < 0.3  # by a version older: up to 0.12; of another token: more than 1
        assert running(server) == 0

        again, interrupt = DeltaSyncCallback(bucket, **settings), Interrupt(server)
        stopped = grpo_run.trainer_of(tmp_path / "model", server.url, again, steps=STEPS, more=[interrupt])
        interrupt.trainer = stopped
        with server.slow_steps():
            with pytest.raises(KeyboardInterrupt):
                stopped.train()
            again.close()
            wait_for(lambda: running(server) == 0, timeout=15)  # 1800 tokens would take longer
        assert [record.ahead for record in again.rollouts.batches] == [False, True]
