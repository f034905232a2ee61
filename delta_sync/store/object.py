"""A store in a bucket of S3, Google Cloud Storage or Azure, or of any server that speaks S3."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import AlreadyExistsError, GenericError

from delta_sync.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.store.base import ObjectInfo, Store, check_range
from delta_sync.store.keys import TEMPORARY, check_key, check_prefix, is_key
from delta_sync.store.object_client import connect, split_uri
from delta_sync.store.object_errors import as_ours, explained

TIMEOUT = 60.0  # seconds within which one request ends, so a link must carry PARALLEL parts in that time
RETRIES = 5
RETRY_SECONDS = 30.0
PART = 8 * 1024**2  # bytes; more than that is read by ranges and written as a multipart upload
MOST_PARTS = 10_000  # of one upload, on S3
PARALLEL = 4
PROBE = f"{TEMPORARY}create-only"  # no key of the contract's, so it is in no listing
UNFENCED = "DELTA_SYNC_UNFENCED"
log = logging.getLogger(__name__)


class ObjectStore(Store):
    """One prefix of a bucket; see ``docs/STORES.md``.

    Every request has a deadline and few retries, so every call ends after at most ``timeout`` + ``retry_seconds``
    seconds for each part of 8 MiB that it moves and each 1000 objects that it lists. Before its first ``create`` it
    finds out whether the server keeps create-only writes; readers never create, and need no permission to write.
    """

    def __init__(
        self,
        uri: str,
        *,
        timeout: float = TIMEOUT,
        retries: int = RETRIES,
        retry_seconds: float = RETRY_SECONDS,
        own: bool = False,
    ) -> None:
        scheme, bucket, prefix = split_uri(uri)
        self.uri = f"{scheme}://{bucket}/{prefix}".rstrip("/")
        self._retries, self._retry_seconds = retries, retry_seconds
        with explained(f"open {self.uri}"):
            self._client = connect(uri, timeout=timeout, retries=retries, retry_seconds=retry_seconds, own=own)
            # A create that the client repeats by itself meets its own success: create() repeats, and knows.
            self._once = connect(uri, timeout=timeout, retries=0, retry_seconds=retry_seconds, own=own)
        self._ordered = scheme != "az"  # Azure's hierarchical namespaces list folders before what else sorts there
        self._fenced: bool | None = None
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""
        check_key(key)
        with self._explained("write", key):
            obstore.put(self._client, key, data, **_multipart(len(data)))

    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does.

        StoreError where the server ignores the condition, unless DELTA_SYNC_UNFENCED=1 takes detection for prevention.
        """
        check_key(key)
        with self._lock:
            if self._fenced is None:
                self._fenced = self._probe()
        if self._fenced:
            self._create(key, bytes(data))
        else:
            self._create_unfenced(key, bytes(data))

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes."""
        check_key(key)
        try:
            size = path.stat().st_size
            data: bytes | Path = path.read_bytes() if size <= PART else path
        except OSError as error:
            kind = NotFoundError if isinstance(error, FileNotFoundError) else StoreError
            raise kind(f"read {path}", expected="a file", got=error.strerror) from error
        with self._explained("write", key):
            obstore.put(self._client, key, data, **_multipart(size))

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""
        return self._get(check_key(key), max_bytes)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""
        check_key(key)
        with self._explained("read", key):
            if start < 0 or not 0 < length <= PART:  # what no one request can ask for
                meta = obstore.head(self._client, key)
                check_range(key, meta["size"], start, length)
                return self._read_parts(key, start, length, _identity(meta))
            try:
                found = self._range(key, start, length)
            except GenericError as error:
                if "status code: 416" in str(error):  # it starts behind the end
                    check_range(key, obstore.head(self._client, key)["size"], start, length)
                raise
            check_range(key, found.meta["size"], start, length)
            return _whole(key, length, bytes(found.bytes()))

    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""
        check_key(key)
        with self._explained("look at", key):
            return ObjectInfo(key, obstore.head(self._client, key)["size"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""
        doing = f"list {check_prefix(prefix)}* in {self.uri}"
        for _ in self._attempts():  # the client does not ask again where an answer breaks off
            try:
                with explained(doing):
                    return iter(sorted(self._listed(prefix), key=lambda info: info.key))
            except StoreError as error:
                failure = error
                if "body" not in str(error.got):
                    break
        raise failure

    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""
        check_key(key)
        # S3 says nothing about a missing one, others do.
        with contextlib.suppress(NotFoundError), self._explained("delete", key):
            obstore.delete(self._client, key)

    def written_at(self, key: str) -> float | None:
        """When an object was written, by the server's clock, to the second."""
        check_key(key)
        with self._explained("look at", key):
            return obstore.head(self._client, key)["last_modified"].timestamp()

    # --- reading

    def _get(self, key: str, max_bytes: int) -> bytes:
        with self._explained("read", key):
            found = obstore.get(self._client, key)
            size = found.meta["size"]
            if size > max_bytes:  # nothing of the body was read yet
                raise IntegrityError(f"size of object {key}", expected=f"at most {max_bytes} bytes", got=size)
            if size <= PART:
                return _whole(key, size, bytes(found.bytes()))
            same = _identity(found.meta)
            del found  # closes its connection
            return self._read_parts(key, 0, size, same)

    def _listed(self, prefix: str) -> Iterator[ObjectInfo]:
        """The client lists whole folders, in key order: begin just before the prefix, and stop behind it."""
        before = prefix[:-1] if is_key(prefix[:-1]) else None
        for page in obstore.list(self._client, prefix.rpartition("/")[0] or None, offset=before):
            for found in page:
                key = found["path"]
                if key.startswith(prefix):
                    if is_key(key):
                        yield ObjectInfo(key, found["size"])
                elif key > prefix and self._ordered:
                    return

    def _range(self, key: str, start: int, length: int) -> Any:
        return obstore.get(self._client, key, options={"range": (start, start + length)})

    def _read_parts(self, key: str, start: int, length: int, same: object) -> bytes:
        """Several ranges at once, all of the one object that ``same`` identifies."""
        buffer, lock = io.BytesIO(bytes(length)), threading.Lock()

        def read(at: int) -> None:
            wanted = min(PART, length - at)
            found = self._range(key, start + at, wanted)
            if _identity(found.meta) != same:
                got, remedy = "another one, written meanwhile", "read it again"
                raise IntegrityError(f"object {key}", expected="one object", got=got, remedy=remedy)
            data = _whole(key, wanted, bytes(found.bytes()))
            with lock:
                buffer.seek(at)
                buffer.write(data)

        pool = ThreadPoolExecutor(PARALLEL)
        try:
            for _ in pool.map(read, range(0, length, PART)):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
        return buffer.getvalue()

    # --- creating

    def _probe(self) -> bool:
        """Whether the server keeps create-only writes: the second of two must be refused. Nothing is deleted."""
        for _ in range(2):
            try:
                self._create(PROBE, PROBE.encode())
            except ConflictError:
                return True
        if os.environ.get(UNFENCED) != "1":
            raise StoreError(
                f"create-only writes in {self.uri}",
                expected="a server that refuses the second of two",
                got="one that takes both, as it ignores If-None-Match: two trainers could both claim this run",
                remedy=f"use a server that keeps them, or set {UNFENCED}=1 where no two trainers ever share a run",
            )
        log.warning(
            "%s ignores create-only writes: a second trainer is not kept from writing, only detected later (%s=1)",
            self.uri, UNFENCED,
        )  # fmt: skip
        return False

    def _create(self, key: str, data: bytes) -> None:
        """Asks again where the answer was lost; what is there then was written by us if it is ``data``."""
        doing, lost = f"create object {key} in {self.uri}", False
        for _ in self._attempts():
            try:
                obstore.put(self._once, key, data, mode="create", use_multipart=False)
                return
            except AlreadyExistsError:
                there = self._holds(key, data)
                if there and lost:
                    return
                if there is not None:
                    raise ConflictError(doing, expected="no such object yet", got="one that exists") from None
                # Two creates at once, of which S3 kept neither: it answers 409 and wants to be asked again.
                failure = StoreError(doing, expected="success", got="a conflict, but no object", remedy="try again")
            except GenericError as error:
                failure, lost = as_ours(doing, error), True
            except Exception as error:  # noqa: BLE001 - the client also raises built-in errors; all become ours
                raise as_ours(doing, error) from None
        with contextlib.suppress(StoreError):  # no time to ask again, but to look
            if lost and self._holds(key, data):
                return
        raise failure

    def _attempts(self) -> Iterator[int]:
        """Count attempts, pausing longer and longer between them, until there were enough or time is over."""
        end = time.monotonic() + self._retry_seconds
        for attempt in range(self._retries + 1):
            yield attempt
            if time.monotonic() > end:
                return
            time.sleep(min(0.1 * 2**attempt, 5.0) * random.uniform(0.5, 1.0))

    def _create_unfenced(self, key: str, data: bytes) -> None:
        """All that can be done without the server: look, write, look again."""
        if self._holds(key, data) is None:
            self.put(key, data)
            if self._holds(key, data):
                return
        doing = f"create object {key} in {self.uri}"
        raise ConflictError(doing, expected="no such object yet", got="one that exists")

    def _holds(self, key: str, data: bytes) -> bool | None:
        """Whether the object is ``data``; None if there is none."""
        try:
            return self._get(key, len(data)) == data
        except NotFoundError:
            return None
        except IntegrityError:
            return False

    def _explained(self, doing: str, key: str) -> contextlib.AbstractContextManager[None]:
        return explained(f"{doing} object {key} in {self.uri}")


def _multipart(size: int) -> dict[str, Any]:
    """How a write of so many bytes is sent: whole, or in parts of which S3 allows 10,000."""
    part = max(PART, -(-size // MOST_PARTS))
    return {"use_multipart": size > PART, "chunk_size": part, "max_concurrency": PARALLEL}


def _identity(meta: Any) -> object:
    return meta["e_tag"], meta["size"], meta["last_modified"]


def _whole(key: str, expected: int, data: bytes) -> bytes:
    if len(data) != expected:
        got, remedy = f"{len(data)} bytes", "read it again"
        raise IntegrityError(f"object {key}", expected=f"{expected} bytes", got=got, remedy=remedy)
    return data
