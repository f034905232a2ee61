"""The same on the real Hub: ``HF_TOKEN=… make test-hub-live``, in a private bucket that is removed afterwards.

Takes some minutes and some hundred requests. It also shows what is only inferred elsewhere: how the Hub matches
prefixes, that its feed says what changed, what it makes of removing what is not there.
"""

from __future__ import annotations

import os
import sys
import time
import uuid
from pathlib import Path

import pytest

from delta_sync.store import open_store
from delta_sync.testing.store_conformance import StoreConformance

if "DELTA_SYNC_HUB_LIVE" not in os.environ:
    pytest.skip("needs a token: make test-hub-live", allow_module_level=True)
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def live_bucket():
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    bucket = f"{api.whoami()['name']}/delta-sync-test-{uuid.uuid4().hex[:8]}"
    api.create_bucket(bucket, private=True)
    yield bucket
    api.delete_bucket(bucket)


@pytest.fixture
def live_uri(live_bucket):
    return f"hf://buckets/{live_bucket}/{uuid.uuid4().hex[:8]}"


class TestLiveHubStore(StoreConformance):
    @pytest.fixture
    def store(self, live_uri):
        return open_store(live_uri)


def test_the_feed_brings_changes(live_uri):
    writer, replica = open_store(live_uri), open_store(live_uri)
    replica.follow()
    try:
        _until(lambda: replica._view.answers)
        started = time.monotonic()
        writer.put("HEAD.json", b"v1")
        _until(lambda: replica._view.find(writer._path("HEAD.json")) is not None)
        print(f"put, and seen by a follower, in {time.monotonic() - started:.2f} s")
        assert replica.get("HEAD.json", max_bytes=9) == b"v1"
    finally:
        replica.close()


def test_a_run_is_followed_bit_by_bit(live_uri, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parent.parent / "ledger")])
    from tiny_run import TinyRun

    from delta_sync.ledger import Ledger

    run = TinyRun(open_store(live_uri))
    run.origin()
    run.anchor(tmp_path / "anchor")
    for _ in range(3):
        run.delta()
    ledger = Ledger(open_store(live_uri))
    run.check(ledger.plan(None, None), None)


def _until(true, seconds=60.0):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.02)
