"""A store in memory behind a link: a call takes a round trip and its bytes' time on shared bandwidth, no more."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from delta_sync.store.base import ObjectInfo
from delta_sync.store.memory import MemoryStore


class Direction:
    """Bandwidth one way, shared by all calls of one end."""

    def __init__(self, bytes_a_second: float) -> None:
        self._rate, self._free, self._lock = bytes_a_second, 0.0, threading.Lock()

    def carry(self, size: int, rtt: float) -> None:
        """Return when ``size`` bytes and the answer to them have gone over."""
        with self._lock:
            self._free = max(self._free, time.monotonic()) + size / self._rate
            done = self._free + rtt
        time.sleep(max(0.0, done - time.monotonic()))


class SlowStore(MemoryStore):
    """One end's view of the memory store ``name``."""

    def __init__(self, name: str, mbit: float, rtt: float) -> None:
        super().__init__(name)
        self._rtt, self._up, self._down = rtt, Direction(mbit * 125_000), Direction(mbit * 125_000)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """See Store."""
        self._up.carry(len(data), self._rtt)
        super().put(key, data)

    def create(self, key: str, data: bytes | memoryview) -> None:
        """See Store."""
        self._up.carry(len(data), self._rtt)
        super().create(key, data)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """See Store."""
        try:
            data = super().get(key, max_bytes=max_bytes)
        except Exception:
            self._down.carry(0, self._rtt)
            raise
        self._down.carry(len(data), self._rtt)
        return data

    def info(self, key: str) -> ObjectInfo:
        """See Store."""
        self._down.carry(0, self._rtt)
        return super().info(key)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """See Store."""
        self._down.carry(0, self._rtt)
        return super().list(prefix)
