"""Replicas with a token that only reads: their acknowledgements go elsewhere, with credentials of their own."""

from __future__ import annotations

import time
import uuid

import pytest
from helpers.fault_proxy import Fault

from delta_sync.ack import Ack
from delta_sync.errors import StoreError
from delta_sync.ledger import Ledger
from delta_sync.store.object_client import OWN
from delta_sync.store.open import open_ack_store, open_store


def ack():
    return Ack("far-away", 7, "0" * 64, 1, "live", None, None, None, None, time.time())


@pytest.fixture(autouse=True)
def nothing_of_its_own(monkeypatch):
    for name in ("HF_TOKEN", *(f"AWS_{x}" for x in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "SESSION_TOKEN", "PROFILE"))):
        monkeypatch.delenv(OWN + name, raising=False)


def test_on_the_hub_a_reader_acknowledges_in_another_bucket(hub, hub_bucket, monkeypatch):
    acks = f"hf://buckets/{hub.new_bucket(f'org/{uuid.uuid4().hex[:12]}')}/acks"
    run = f"hf://buckets/{hub_bucket}/run"
    open_store(run).put("HEAD.json", b"{}")
    monkeypatch.setenv("HF_TOKEN", "hf_test_read")
    replica = Ledger(open_store(run), acks=open_ack_store(acks))
    assert replica.store.get("HEAD.json", max_bytes=9) == b"{}"
    with pytest.raises(StoreError, match="403"):
        replica.acknowledge(ack())
    monkeypatch.setenv("DELTA_SYNC_ACK_HF_TOKEN", "hf_test_write")
    replica.acknowledge(ack())
    with pytest.raises(StoreError, match="403"):  # the run's store goes on with the token that only reads
        replica.store.put("HEAD.json", b"{}")
    monkeypatch.delenv("DELTA_SYNC_ACK_HF_TOKEN")
    trainer = Ledger(open_store(run), acks=open_ack_store(acks))
    assert trainer.acknowledgements()["far-away"].version == 7
    assert Ledger(open_store(run)).acknowledgements() == {}


def credential(proxy, store):
    """Who signed the store's next request, its session token, and for which region."""
    proxy.requests.clear()
    Ledger(store).acknowledge(ack())
    headers = {name.lower(): value for name, value in proxy.requests[-1].headers.items()}
    user, _, region, *_ = headers["authorization"].partition("Credential=")[2].split("/")
    return user, headers.get("x-amz-security-token"), region


def test_on_s3_acknowledgements_have_keys_of_their_own(proxy, bucket, monkeypatch):
    uri = f"s3://{bucket}/acks"
    assert credential(proxy, open_ack_store(uri)) == ("test", None, "us-east-1")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "OF-THE-RUN")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_ACCESS_KEY_ID", "ACKS")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_SECRET_ACCESS_KEY", "hush")
    assert credential(proxy, open_ack_store(uri)) == ("ACKS", None, "us-east-1")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_SESSION_TOKEN", "OF-THE-ACKS")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_REGION", "eu-north-1")
    assert credential(proxy, open_ack_store(uri)) == ("ACKS", "OF-THE-ACKS", "eu-north-1")
    assert credential(proxy, open_store(uri)) == ("test", "OF-THE-RUN", "us-east-1")


def test_a_public_run_s_unsigned_requests_are_not_the_acknowledgements(proxy, bucket, monkeypatch):
    monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_ACCESS_KEY_ID", "ACKS")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_SECRET_ACCESS_KEY", "hush")
    assert credential(proxy, open_ack_store(f"s3://{bucket}/acks"))[0] == "ACKS"


def test_on_s3_a_profile_of_their_own(proxy, bucket, monkeypatch, tmp_path):
    (tmp_path / "credentials").write_text("[acks]\naws_access_key_id = PROFILED\naws_secret_access_key = hush\n")
    (tmp_path / "config").write_text(f"[profile acks]\nregion = ap-south-1\nendpoint_url = {proxy.url}\n")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("DELTA_SYNC_ACK_AWS_PROFILE", "acks")
    assert credential(proxy, open_ack_store(f"s3://{bucket}/acks")) == ("PROFILED", None, "ap-south-1")


def test_a_run_that_may_not_be_written_and_acknowledgements_that_may(proxy, bucket):
    """As a bucket's policy would: no writes below run/, and nobody notices."""
    forbidden = Fault(status=403, code="AccessDenied")
    proxy.rule = lambda request: forbidden if request.method == "PUT" and "/run/" in request.path else None
    replica = Ledger(open_store(f"s3://{bucket}/run"), acks=open_ack_store(f"s3://{bucket}/acks"))
    replica.acknowledge(ack())
    assert list(replica.acknowledgements()) == ["far-away"]
    with pytest.raises(StoreError):
        replica.store.put("HEAD.json", b"{}")


def test_a_folder_needs_nothing(tmp_path):
    Ledger(open_store(str(tmp_path / "run")), acks=open_ack_store(str(tmp_path / "acks"))).acknowledge(ack())
    assert (tmp_path / "acks" / "replicas" / "far-away.json").exists()
