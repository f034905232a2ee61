from __future__ import annotations

import uuid

import pytest
from tiny_run import TinyRun

from delta_sync.store import LocalStore, MemoryStore


@pytest.fixture(params=["local", "memory"])
def store(request, tmp_path):
    if request.param == "local":
        yield LocalStore(tmp_path / "run")
    else:
        memory = MemoryStore(uuid.uuid4().hex)
        yield memory
        memory.clear()


@pytest.fixture
def memory():
    store = MemoryStore(uuid.uuid4().hex)
    yield store
    store.clear()


@pytest.fixture
def run(store):
    return TinyRun(store)
