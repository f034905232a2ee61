"""The contract every store keeps: a flat map from keys to immutable-by-convention objects."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from delta_sync.errors import IntegrityError
from delta_sync.store.keys import check_key


@dataclass(frozen=True)
class ObjectInfo:
    """A stored object's key and size in bytes."""

    key: str
    size: int


class Store(ABC):
    """A bucket, or a folder of one; keys are ``/``-separated, relative, and never contain ``..``.

    A put is atomic and durable when it returns: readers see the old object or the whole new one.
    Every method raises StoreError (retry), NotFoundError (no such key) or FormatError (bad key).
    """

    uri: str

    @abstractmethod
    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""

    @abstractmethod
    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does."""

    @abstractmethod
    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes."""

    @abstractmethod
    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""

    @abstractmethod
    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""

    @abstractmethod
    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""

    @abstractmethod
    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""

    def written_at(self, key: str) -> float | None:
        """When the store says that an object was written, by its own clock in unix seconds; None if it does not say."""
        check_key(key)
        return None

    def follow(self) -> None:  # noqa: B027 - to do nothing is right for most stores
        """Say that this reader will look often, as a replica does.

        A store that is told of changes may from then on answer reads from what it was told, some minutes late at most
        where a message was lost; writers, who must see what is there now, do not follow. Other stores do nothing.
        """


def check_range(key: str, size: int, start: int, length: int) -> None:
    """IntegrityError unless an object of ``size`` bytes has ``length`` bytes from ``start``."""
    if start < 0 or length < 0 or start + length > size:
        expected, got = f"{length} bytes from {start}", f"{size} bytes in all"
        raise IntegrityError(f"object {key}", expected=expected, got=got)
