"""Processes of test_object_cache.py: ``start(read, …)`` returns at once; the process may be killed."""

from __future__ import annotations

import logging
import multiprocessing
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

from delta_sync.ledger import Ledger
from delta_sync.manifest import ObjectRef
from delta_sync.store import open_store
from delta_sync.store.cache import ObjectCache

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["cache_process"])


def start(environment: Mapping[str, str], *arguments: object):
    process = FORKS.Process(target=read, args=(dict(environment), *arguments), daemon=True)
    process.start()
    return process


def read(environment, uri, folder, refs: list[ObjectRef], log: str, file_bytes: int | None = None, go=None) -> None:
    """Read objects by way of the cache, and write down how long each took, and what the log said."""
    os.environ.update(environment)
    logging.basicConfig(filename=f"{log}.log", level=logging.WARNING)
    if file_bytes is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, file_bytes))  # the disk is full after so many
    ledger = Ledger(open_store(uri), cache=ObjectCache(folder))
    if go is not None:
        go.wait(60)
    for ref in refs:
        began = time.monotonic()
        ledger.read_object(ref)  # checks its hash
        with Path(log).open("a") as file:
            print(f"{time.monotonic() - began:.3f}", file=file, flush=True)
