"""The store contract on the Hub store, over HTTP, through the unmodified hf_xet."""

from __future__ import annotations

import pytest

from delta_sync.store import open_store
from delta_sync.testing.store_conformance import StoreConformance


class TestHubStore(StoreConformance):
    @pytest.fixture
    def store(self, hub_bucket):
        return open_store(f"hf://buckets/{hub_bucket}/some/run")


class TestFollowingHubStore(StoreConformance):
    @pytest.fixture
    def store(self, hub_bucket):
        store = open_store(f"hf://buckets/{hub_bucket}")
        store.follow()
        yield store
        store.close()
