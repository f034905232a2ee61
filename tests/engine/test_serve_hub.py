"""One real ``vllm serve --delta-sync hf://…``: the flag, the bucket and a token are all that it needs."""

from __future__ import annotations

import time

import pytest
from helpers.publish import Publisher
from helpers.server import VllmServer
from helpers.tiny_models import build


@pytest.fixture
def served(hub, hub_bucket, tmp_path):
    """(trainer, server) on one bucket, before the first version."""
    base, uri = build(tmp_path / "base"), f"hf://buckets/{hub_bucket}/run"
    args = ("--delta-sync", uri, "--delta-sync-config", '{"replica": "box"}')
    with VllmServer(base, tmp_path / "server.log", args) as server:
        yield Publisher.of_checkpoint(uri, base), server


def test_a_server_follows_a_run_in_a_bucket_of_the_hub(hub, served):
    trainer, server = served
    server.wait_version(trainer.origin().version)
    for step in range(1, 4):
        version = trainer.step(step, 0.05)
        status = server.wait_version(version.version)
        assert status["state_digest"] == version.state_digest
    time.sleep(1.0)
    hub.forget()
    time.sleep(3.0)  # some 30 looks of the server for a newer version
    idle = hub.counts()
    assert idle["resolver"] == 0
    assert idle["api"] <= 1  # a listing, if it was due

    hub.faults.add("status", "batch", status=503, times=2)
    hub.faults.add("drop", "GET /cas/xorbs", times=1)
    hub.drop_feeds()
    newest = trainer.step(4, 0.05)
    server.wait_version(newest.version)
    server.kill()
    newest = trainer.step(5, 0.05)
    trainer.anchor(newest)
    server.start()
    server.wait_healthy()
    assert server.wait_version(newest.version)["state_digest"] == newest.state_digest
    assert "hf_test" not in server.log.read_text()
