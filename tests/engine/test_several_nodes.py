"""One deployment over two nodes, as ``--nnodes 2`` starts it: versions under streams, then a node lost in a commit.

Both are on this machine, each with its own process tree; they speak to each other over TCP only, as two machines do.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import time
import urllib.error
from itertools import count
from pathlib import Path

import pytest
from helpers import slow_steps
from helpers.open_streams import commit_under_streams
from helpers.publish import Publisher
from helpers.server import VllmServer, free_port
from helpers.tiny_models import build

pytestmark = pytest.mark.long
COMMITS = 10
PROMPT = range(30, 60)
PATIENCE = 90  # seconds that vLLM gives a step: with 10, a machine that stood still for a moment lost a node


def test_versions_reach_both_nodes_and_losing_one_in_a_commit_ends_the_server(tmp_path: Path) -> None:
    base, run, lost = build(tmp_path / "base", "llama"), str(tmp_path / "run"), tmp_path / "lost"
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    config = {"read_back": True, "fault": {"rank": 1, "at": "commit_half", "kill": True, "while": str(lost)}}
    args = ["--delta-sync", run, "--delta-sync-config", json.dumps(config), "-tp", "2", "--nnodes", "2"]
    args += ["--master-addr", "127.0.0.1", "--master-port", str(free_port())]
    env = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(PATIENCE)}
    other = VllmServer(base, tmp_path / "other.log", [*args, "--node-rank", "1", "--headless"], env)
    first = VllmServer(base, tmp_path / "first.log", [*args, "--node-rank", "0"], env, plugins=[slow_steps])
    with contextlib.ExitStack() as ends:
        ends.callback(other.stop)
        other.start()
        ends.enter_context(first)
        first.wait_version(1)
        seeds = count()

        def commit() -> None:
            newest = trainer.step(next(seeds), 0.05)
            assert first.wait_version(newest.version)["state_digest"] == newest.state_digest

        commit_under_streams(COMMITS, first, [range(20 + i, 50 + i) for i in range(4)], 1900, commit)
        for name, bits in trainer.weights.items():
            assert first.get_bytes(f"/delta_sync/tensors/{name}")[0] == bits.tobytes(), name
        assert first.get("/delta_sync/tensors?scan=1")["state_digest"] == first.status()["state_digest"]
        status = first.status()
        assert (status["ranks"], status["rollbacks"], status["refusals"]) == (2, 0, 0)

        old = first.complete(PROMPT)["text"]
        lost.touch()
        trainer.step(next(seeds), 0.05)
        deadline = time.monotonic() + 60 + PATIENCE
        while (first.alive or other.alive) and time.monotonic() < deadline:
            try:
                assert first.complete(PROMPT)["text"] == old, "half a version must never answer"
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                time.sleep(0.1)
        assert not other.alive, other.tail()
        assert not first.alive, first.tail()
        assert "no answer of all workers to commit" in first.text(), first.tail()
