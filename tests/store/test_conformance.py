from __future__ import annotations

import uuid

import pytest

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
