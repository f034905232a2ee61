"""A store whose every call ends: a network file system that hangs must not hang the command."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from delta_sync.deadline import StillRunningError, within
from delta_sync.errors import NotFoundError, StoreError
from delta_sync.store.base import ObjectInfo, Store
from delta_sync.store.open import open_store, redact_uri

SECONDS = 120.0  # more than the stores take for all their retries, as their errors say more
SLOWEST = 1024**2  # bytes a second that a large read or write may take
Result = TypeVar("Result")


class TimedStore(Store):
    """The store behind a URI; StoreError ``seconds`` after a call began, later by what its bytes take at 1 MiB/s.

    Nothing more is asked of a store that has failed, and nothing else, for ``patience`` seconds.
    """

    def __init__(
        self,
        uri: str,
        seconds: float = SECONDS,
        *,
        opened: Callable[[str], Store] = open_store,
        patience: float = math.inf,
    ) -> None:
        self.uri, self._seconds, self._patience = redact_uri(uri), seconds, patience
        self._failed = 0.0  # seconds that went into failing calls since one that did not
        self.inner = self._timed("open", 0, lambda: opened(uri))
        self.uri = self.inner.uri

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""
        self._timed(f"write {key} in", len(data), lambda: self.inner.put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does."""
        self._timed(f"create {key} in", len(data), lambda: self.inner.create(key, data))

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes."""
        self._timed(f"write {key} in", path.stat().st_size, lambda: self.inner.put_file(key, path))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""
        return self._timed(f"read {key} in", max_bytes, lambda: self.inner.get(key, max_bytes=max_bytes))

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""
        return self._timed(f"read {key} in", length, lambda: self.inner.read_range(key, start, length))

    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""
        return self._timed(f"look at {key} in", 0, lambda: self.inner.info(key))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""
        return iter(self._timed(f"list {prefix}* in", 0, lambda: [*self.inner.list(prefix)]))

    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""
        self._timed(f"delete {key} in", 0, lambda: self.inner.delete(key))

    def written_at(self, key: str) -> float | None:
        """When the store says that an object was written; None if it does not say."""
        return self._timed(f"look at {key} in", 0, lambda: self.inner.written_at(key))

    def follow(self) -> None:
        """Say that this reader will look often."""
        self.inner.follow()

    def _timed(self, doing: str, count: int, call: Callable[[], Result]) -> Result:
        if self._failed > self._patience:
            raise self._no_answer(doing, f"none, and none was waited for: it had failed for {self._failed:.0f} s")
        seconds, began = self._seconds + count / SLOWEST, time.monotonic()
        try:
            result = within(seconds, call)
        except StillRunningError:
            self._failed += time.monotonic() - began
            raise self._no_answer(doing, f"no answer in {seconds:.0f} s") from None
        except StoreError as error:
            self._failed = 0.0 if isinstance(error, NotFoundError) else self._failed + time.monotonic() - began
            raise
        self._failed = 0.0
        return result

    def _no_answer(self, doing: str, got: str) -> StoreError:
        remedy = "look at the network and the server, or the file system"
        return StoreError(f"{doing} {self.uri}", expected="an answer", got=got, remedy=remedy)
