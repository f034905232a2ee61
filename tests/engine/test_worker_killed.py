"""A worker that is killed while it stages or commits takes the engine with it: nothing is served by half a version."""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
from pathlib import Path

import pytest
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.tiny_models import build

pytestmark = pytest.mark.long
PROMPT = range(30, 60)


@pytest.mark.parametrize("point", ["stage", "commit_half"])
def test_the_engine_dies_loudly_and_answers_nothing_mixed(point: str, tmp_path: Path) -> None:
    base, run = build(tmp_path / "base", "llama"), str(tmp_path / "run")
    trainer = Publisher.of_checkpoint(run, base)
    trainer.origin()
    config = json.dumps({"fault": {"rank": 1, "at": point, "kill": True}})
    args = ("-tp", "2", "--delta-sync", run, "--delta-sync-config", config)
    with VllmServer(base, tmp_path / "server.log", args) as server:
        server.wait_version(1)
        old = server.complete(PROMPT)["text"]
        trainer.step(1, 0.05)
        deadline = time.monotonic() + 120
        while server.alive and time.monotonic() < deadline:
            try:
                assert server.complete(PROMPT)["text"] == old, "half a version must never answer"
            except (urllib.error.URLError, http.client.HTTPException, OSError):
                time.sleep(0.1)
        assert not server.alive, server.tail()
        assert "died" in server.text() and "EngineDeadError" in server.text(), server.tail()
