"""Starting several real training processes on this machine, and what sharded training is called to accelerate."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from helpers.server import free_port

HERE = Path(__file__).parent
FSDP2 = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT",
}


ZERO = {"ACCELERATE_USE_DEEPSPEED": "true"}


def zero(stage: int, *, bf16: bool) -> dict[str, Any]:
    """Trainer arguments for DeepSpeed ZeRO with torch's own optimizer, so that no kernel has to be built."""
    config = {
        "zero_optimization": {"stage": stage},
        "bf16": {"enabled": bf16},
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 1,
        "zero_allow_untested_optimizer": True,
    }
    return {"deepspeed": config, "bf16": bf16}


def run_ranks(
    ranks: int, child: str, said: dict[str, Any], environment: dict[str, str] | None = None, timeout: float = 240
) -> list[str]:
    """The last line that each rank printed; fails, with its errors, if one did not end well or not in time.

    One card a rank where there are any (NCCL), else CPUs (gloo).
    """
    import torch

    if 0 < torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} cards")
    port = free_port()
    common = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks),
        "LOCAL_WORLD_SIZE": str(ranks), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", **(environment or {}),
    }  # fmt: skip
    if not torch.cuda.is_available() and "ACCELERATE_USE_DEEPSPEED" not in common:
        common["ACCELERATE_USE_CPU"] = "true"
    processes = [
        subprocess.Popen(
            [sys.executable, str(HERE / child), json.dumps(said)],
            env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    deadline = time.monotonic() + timeout
    outputs = []
    try:
        for process in processes:
            try:
                outputs.append(process.communicate(timeout=max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGABRT)  # where each of its threads is, in what it prints
                outputs.append(process.communicate(timeout=30))
    finally:
        for process in processes:
            process.kill()
    for process, (out, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, f"{out[-1000:]}\n{errors[-4000:]}"
    return [out.strip().splitlines()[-1] for out, _ in outputs]
