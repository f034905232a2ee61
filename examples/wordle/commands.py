"""The three command lines of the demo, and the environment variables that suit a small box."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path


def environment_server(port: int) -> list[str]:
    return [sys.executable, "-m", "examples.wordle.env_server", "--port", str(port)]


def vllm_serve(args: argparse.Namespace, model: str, bucket: str, port: int) -> list[str]:
    """`vllm serve` with our one flag; read-back is on because the demo compares the served bits in the end."""
    command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", model, "--delta-sync", bucket]
    command += ["--delta-sync-config", json.dumps({"read_back": True})]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--uvicorn-log-level", "warning"]
    command += ["--max-model-len", str(args.context), "--max-num-seqs", str(args.generations + 1)]
    if has_gpu():
        return [*command, "--gpu-memory-utilization", "0.4"]  # the trainer is on it too
    # Compiling takes minutes on two cores. Small batches, so that rollouts' prompts don't hold up the open stream.
    return [*command, "--enforce-eager", "--max-num-batched-tokens", "64"]


def train(args: argparse.Namespace, model: str, bucket: str, output: Path, vllm: str, env: str) -> list[str]:
    settings = {
        "model": model,
        "vllm": vllm,
        "env": env,
        "bucket": bucket,
        "output": output,
        "steps": args.steps,
        "generations": args.generations,
        "turns": args.turns,
        "learning-rate": args.learning_rate,
        "codec": args.codec,
        "anchor-every": args.steps // 2 + 1,  # one anchor: what `materialize` and others begin at
    }
    options = [text for name, value in settings.items() for text in (f"--{name}", str(value))]
    return [sys.executable, "-m", "examples.wordle.train", *options]


def variables(model: str) -> dict[str, str]:
    """Environment for all three; what the user has set already wins."""
    threads = str(max(1, (os.cpu_count() or 2) // 2))  # half the cores for the server, half for the trainer
    chosen = {
        "OMP_NUM_THREADS": threads,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_NO_USAGE_STATS": "1",
        "TRL_EXPERIMENTAL_SILENCE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
    }
    if Path(model).is_dir():
        chosen["HF_HUB_OFFLINE"] = "1"
    return {name: os.environ.get(name, value) for name, value in chosen.items()}


def has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def has_fast_bf16() -> bool:
    """Whether bf16 matrices multiply fast here: on a GPU, or on a CPU with instructions for it (AVX512-BF16, AMX)."""
    import torch

    return has_gpu() or bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
