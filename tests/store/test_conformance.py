from __future__ import annotations

import uuid

import pytest
from helpers.fault_proxy import Fault

from delta_sync.store import LocalStore, MemoryStore, open_store
from delta_sync.testing.store_conformance import StoreConformance


class TestLocalStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path):
        return LocalStore(tmp_path / "not yet" / "there")


class TestMemoryStore(StoreConformance):
    @pytest.fixture
    def store(self):
        store = MemoryStore(uuid.uuid4().hex)
        yield store
        store.clear()


class TestObjectStore(StoreConformance):
    """Over HTTP, on a server that keeps create-only writes."""

    @pytest.fixture
    def store(self, proxy, bucket):
        return open_store(f"s3://{bucket}/some/run")


class TestObjectStoreInAWholeBucket(StoreConformance):
    @pytest.fixture
    def store(self, proxy, bucket):
        return open_store(f"s3://{bucket}")


SIGNED = "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=x"


def google_on_s3(request):
    """Google's words for credentials and create-only, in S3's; the rest of its XML interface moto knows as it is."""
    only = "x-goog-if-generation-match" in {name.lower() for name in request.headers}
    return Fault(strip=("Authorization",), add={"Authorization": SIGNED, **({"If-None-Match": "*"} if only else {})})


class TestGoogleClientOnS3Server(StoreConformance):
    """Google's client against moto's S3, a stand-in: no server for Google's storage can be installed here."""

    @pytest.fixture
    def store(self, proxy, bucket, monkeypatch):
        monkeypatch.setenv("GOOGLE_BASE_URL", proxy.url)
        monkeypatch.setenv("GOOGLE_BEARER_TOKEN", "not-a-secret")
        proxy.rule = google_on_s3
        return open_store(f"gs://{bucket}/some/run")
