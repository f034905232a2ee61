"""Asking a fresh engine, in a process of its own, what a checkpoint answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from helpers.machine import LLM_ARGS
from helpers.server import QUIET_CPU

from vllm_delta_plugin.flag import WORKER_EXTENSION

ENGINE = {"dtype": "bfloat16", "enforce_eager": True, "max_model_len": 2048, "max_num_seqs": 8, **LLM_ARGS}


def following(uri: Path | str, **config: Any) -> dict[str, Any]:
    """The keyword arguments of an LLM that follows a run."""
    return {
        "worker_extension_cls": WORKER_EXTENSION,
        "additional_config": {"delta_sync": {"uri": str(uri), **config}},
    }


def ask(
    folder: Path,
    model: Path,
    llm: dict[str, Any],
    prompts: Sequence[Sequence[int]],
    tokens: int,
    sync: Sequence[int | None] = (),
    multiprocessing: bool = False,
) -> list[dict[str, Any]]:
    """One round of answers, and one more after each version in ``sync``; an AssertionError with the log if it fails."""
    content = {"model": str(model), "llm": {**ENGINE, **llm}, "prompts": [list(p) for p in prompts], "tokens": tokens}
    return list(run(folder, "oracle.py", {**content, "sync": list(sync)}, multiprocessing))


def run(
    folder: Path, script: str, content: Mapping[str, Any], multiprocessing: bool = False, timeout: float = 540
) -> Any:
    """What a script beside this one answers within ``timeout`` seconds; an AssertionError with the log if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    request, answer, log = folder / "request.json", folder / "answer.json", folder / "log.txt"
    request.write_text(json.dumps(content))
    env = {**os.environ, **QUIET_CPU, "VLLM_ENABLE_V1_MULTIPROCESSING": str(int(multiprocessing))}
    with log.open("wb") as out:
        command = [sys.executable, str(Path(__file__).with_name(script)), str(request), str(answer)]
        done = subprocess.run(command, env=env, stdout=out, stderr=subprocess.STDOUT, timeout=timeout, check=False)
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]
    return json.loads(answer.read_text())
