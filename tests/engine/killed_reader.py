"""A replica in a process of its own that is killed -9 at a named point of its next version.

Everything but the ranks is real: coordinator, staging, proof, commit, acknowledgement, store and cache.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import engine_fakes
from engine_fakes import Weights
from test_coordinator import Replica

import delta_sync.ledger
import delta_sync.store.cache
import delta_sync.store.local
import vllm_delta_plugin.coordinator
import vllm_delta_plugin.engine_stage
from delta_sync.ledger import Ledger
from delta_sync.store.cache import ObjectCache
from delta_sync.store.open import open_store

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["killed_reader"])
CACHE = delta_sync.store.cache
# where in one version's way: what is called there; "before" it, "after" it
POINTS: dict[str, tuple[Any, str, str]] = {
    "look": (Ledger, "_look", "before"),
    "plan": (delta_sync.ledger, "build_plan", "before"),
    "fetch": (ObjectCache, "read", "before"),
    "cache write": (CACHE, "pieces", "half way"),
    "cache written": (CACHE, "_download", "after"),
    "decode": (engine_fakes, "decode_delta", "before"),
    "stage": (engine_fakes, "apply", "after"),
    "proof": (vllm_delta_plugin.engine_stage, "prove", "before"),
    "commit of the second rank": (engine_fakes.Rank, "commit", "second"),
    "settle": (engine_fakes.Rank, "settle", "before"),
    "acknowledgement": (Ledger, "acknowledge", "before"),
    "acknowledgement written": (Ledger, "acknowledge", "after"),
}


def with_cache(replica: Replica, uri: str, cache: str) -> Replica:
    for rank in replica.executor.ranks:
        rank.ledger = Ledger(open_store(uri), cache=ObjectCache(cache))
    return replica


def start(environment: Mapping[str, str], uri: str, cache: str, weights: Weights, point: str, served: str) -> Any:
    process = FORKS.Process(target=serve, args=(dict(environment), uri, cache, weights, point, served), daemon=True)
    process.start()
    return process


def serve(environment: dict[str, str], uri: str, cache: str, weights: Weights, point: str, served: str) -> None:
    """Serve version 2, say so in the file ``served``, and die at ``point`` of the next one."""
    os.environ.update(environment)
    replica = with_cache(Replica(uri, weights), uri, cache).start()
    replica.wait("version 2", lambda status: status["version"] == 2, 60)
    replica.wait("an acknowledgement", lambda _: _acknowledged(replica, 2), 60)
    arm(point, Path(served))
    Path(served).touch()
    time.sleep(60)
    raise AssertionError(f"nothing came to {point!r}")


def _acknowledged(replica: Replica, version: int) -> bool:
    found = replica.ledger.acknowledgements().get("r")
    return found is not None and found.version == version


def arm(point: str, served: Path) -> None:
    owner, name, when = POINTS[point]
    real = getattr(owner, name)

    def die() -> None:
        served.touch()  # a look needs no new version: it may come before the word of version 2
        os.kill(os.getpid(), signal.SIGKILL)

    def called(*args: Any, **more: Any) -> Any:
        if when == "before" or (when == "second" and args[0].index == 1):
            die()
        result = real(*args, **more)
        if when == "after":
            die()
        return half(result) if when == "half way" else result

    def half(pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            yield piece[: len(piece) // 2]
            die()

    setattr(owner, name, called)
