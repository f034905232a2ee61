"""A store in this process's memory, for tests and examples."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

from delta_sync.errors import ConflictError, IntegrityError, NotFoundError
from delta_sync.store.base import ObjectInfo, Store, check_range
from delta_sync.store.keys import check_key, check_prefix

_LOCK = threading.Lock()
_STORES: dict[str, dict[str, bytes]] = {}


class MemoryStore(Store):
    """Every MemoryStore of one name in one process is the same store."""

    def __init__(self, name: str) -> None:
        self.uri = f"memory://{name}"
        with _LOCK:
            self._objects = _STORES.setdefault(name, {})

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""
        self._objects[check_key(key)] = bytes(data)

    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does."""
        with _LOCK:
            if check_key(key) in self._objects:
                raise ConflictError(f"object {key}", expected="none yet", got="one that exists")
            self._objects[key] = bytes(data)

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes."""
        self.put(key, path.read_bytes())

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""
        data = self._object(key)
        if len(data) > max_bytes:
            raise IntegrityError(f"size of object {key}", expected=f"at most {max_bytes} bytes", got=len(data))
        return data

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""
        data = self._object(key)
        check_range(key, len(data), start, length)
        return data[start : start + length]

    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""
        return ObjectInfo(key, len(self._object(key)))

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""
        check_prefix(prefix)
        found = [(key, len(data)) for key, data in self._objects.copy().items() if key.startswith(prefix)]
        return (ObjectInfo(key, size) for key, size in sorted(found))

    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""
        self._objects.pop(check_key(key), None)

    def clear(self) -> None:
        """Remove every object."""
        self._objects.clear()

    def _object(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise NotFoundError(f"object {key} in {self.uri}", expected="an object", got="none") from None
