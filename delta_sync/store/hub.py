"""A bucket of the Hugging Face Hub as a store: ``hf://buckets/org/name[/folder]``."""

from __future__ import annotations

import json
import math
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Iterator
from mimetypes import guess_type
from pathlib import Path

from delta_sync.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.store.attempts import Deadline
from delta_sync.store.base import ObjectInfo, Store, check_range
from delta_sync.store.hub_client import HubClient
from delta_sync.store.hub_tree import list_files, uploaded_at
from delta_sync.store.hub_uri import HubPlace
from delta_sync.store.hub_view import HubView
from delta_sync.store.hub_xet import GoneError, XetFile, XetTransfer
from delta_sync.store.keys import check_key, check_prefix, is_key

SECONDS = 60.0  # for one call, retries included, beside the time that its bytes take
SLOWEST = 1e6  # bytes per second that a transfer must reach
RECENT_SECONDS = 2.0  # how old an answer of the Hub's may be for a follower whose view does not answer
KEPT_OBJECT, KEPT_OBJECTS = 1 << 20, 64  # bytes of, and number of, small objects that are remembered by hash


class HubStore(Store):
    """One folder of one bucket as a store; may be shared by threads.

    A put uploads the bytes to Xet and then gives them their path in one call, so readers see old or new content whole.
    The Hub has no conditional writes: ``create`` looks, writes and reads back. Within a process it is exact; between
    processes it *detects* most collisions and prevents none, so whoever creates has to write content of its own and
    look again before relying on it, as ``Writer`` does before and after each commit. Xet does not verify what it
    sends: whoever reads has to check a hash, as ``Ledger`` does.
    """

    def __init__(
        self,
        place: HubPlace,
        *,
        endpoint: str | None = None,
        seconds: float = SECONDS,
        token_from: str | None = None,
    ) -> None:
        self.uri = place.uri
        self._top = f"{place.folder}/" if place.folder else ""
        self._seconds = seconds
        self._client = HubClient(place.bucket, endpoint, token_from)
        self._xet = XetTransfer(self._client)
        self._creating = threading.Lock()
        self._view: HubView | None = None
        self._recent: dict[str, tuple[float, XetFile | None]] = {}
        self._kept = _SmallObjects()

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""
        path, doing = self._path(key), self._doing("write", key)
        deadline = self._deadline(len(data))
        self._name(path, self._xet.upload(bytes(data), deadline, doing), time.time(), deadline, doing)

    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does, or if another writer's is there after."""
        path, doing = self._path(key), self._doing("create", key)
        deadline = self._deadline(len(data))
        with self._creating:
            file = self._xet.upload(bytes(data), deadline, doing)
            if self._ask(path, deadline, doing) is not None:
                raise ConflictError(doing, expected="no such object yet", got="one that exists")
            self._name(path, file, time.time(), deadline, doing)
            found = self._ask(path, deadline, doing)
        if found is None:
            raise StoreError(doing, expected="the object just written", got="none", remedy="look again, then decide")
        if found != file:
            raise ConflictError(doing, expected="this writer's object", got="another's, written at the same time")

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes, with a progress bar if it is large."""
        target, doing = self._path(key), self._doing("write", key)
        try:
            found = path.stat()
        except OSError as error:
            raise StoreError(f"read {path}", expected="a file", got=error.strerror, remedy="check the path") from error
        deadline = self._deadline(found.st_size)
        self._name(target, self._xet.upload(path, deadline, doing), found.st_mtime, deadline, doing)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""
        file = self._found(key)
        if file.size > max_bytes:
            raise IntegrityError(f"size of object {key}", expected=f"at most {max_bytes} bytes", got=file.size)
        return self._read(key, file, 0, file.size)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""
        file = self._found(key)
        check_range(key, file.size, start, length)
        return self._read(key, file, start, start + length)

    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""
        return ObjectInfo(key, self._found(key).size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""
        start = self._top + check_prefix(prefix)
        view = self._live_view()
        files = view.starting(start) if view else None
        if files is None:
            files = list_files(self._client, start, self._deadline(), f"list {prefix}* in {self.uri}")
        keys = ((path[len(self._top) :], files[path].size) for path in sorted(files))
        return (ObjectInfo(key, size) for key, size in keys if is_key(key))

    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""
        path, doing, deadline = self._path(key), self._doing("delete", key), self._deadline()
        if self._ask(path, deadline, doing) is None:
            return
        failed = self._batch({"type": "deleteFile", "path": path}, deadline, doing)
        if failed and self._ask(path, deadline, doing) is not None:
            raise StoreError(doing, expected="success", got=failed, remedy="try again")
        self._note(path, None)

    def follow(self) -> None:
        """Listen to the bucket's events and answer reads from what they say: no requests while nothing changes."""
        if self._view is None or not self._view.runs:
            self._view = view = HubView(self._client, self._top)
            view.start()
            weakref.finalize(self, view.stop)

    @property
    def listens(self) -> bool:
        """Whether this follower is told of changes at once, by the event feed; without it the folder is listed."""
        return self._view is not None and self._view.listens

    def written_at(self, key: str) -> float | None:
        """When an object was written, by the Hub's clock."""
        return uploaded_at(self._client, self._path(key), self._deadline(), self._doing("look at", key))

    def close(self) -> None:
        """Stop following."""
        if self._view:
            self._view.stop()
            self._view = None

    # --- from keys to content

    def _path(self, key: str) -> str:
        return self._top + check_key(key)

    def _doing(self, verb: str, key: str) -> str:
        return f"{verb} object {key} in {self.uri}"

    def _deadline(self, size: int = 0) -> Deadline:
        return Deadline(self._seconds + size / SLOWEST)

    def _found(self, key: str) -> XetFile:
        path, doing = self._path(key), self._doing("read", key)
        view = self._live_view()
        file = view.find(path) if view else self._look_up(path, doing)
        if file is None:
            raise NotFoundError(doing, expected="an object", got="none")
        return file

    def _read(self, key: str, file: XetFile, start: int, end: int) -> bytes:
        """Content by hash; if the storage has dropped it, what the path stands for now."""
        doing, deadline = self._doing("read", key), self._deadline(end - start)
        kept = self._kept.get(file) if self._view else None
        if kept is not None:
            return kept[start:end]
        try:
            data = self._xet.read(file, start, end, deadline, doing)
        except GoneError as error:
            now = self._ask(self._path(key), deadline, doing)
            self._note(self._path(key), now)
            got = "a path without content" if now == file else "other content, or none, by now"
            raise StoreError(doing, expected="the content it stands for", got=got, remedy="read it again") from error
        if len(data) == file.size:
            self._kept.offer(file, data)
        return data

    # --- the Hub's side

    def _ask(self, path: str, deadline: Deadline, doing: str) -> XetFile | None:
        """What the Hub says of one path right now: one request against the resolvers' budget."""
        url = self._client.resolve_url(path)
        response = self._client.call("HEAD", url, deadline, doing=doing, expected=(200, 302, 303, 307, 308, 404))
        headers = response.headers
        if response.status_code == 404 and headers.get("x-error-code") != "RepoNotFound":
            return None
        try:
            return XetFile(headers["x-xet-hash"], int(headers.get("x-linked-size") or headers["content-length"]))
        except (KeyError, ValueError) as error:
            raise self._client.refusal(response, doing) from error

    def _look_up(self, path: str, doing: str) -> XetFile | None:
        """Ask, but not ten times a second because a follower polls while its view does not answer."""
        if self._view is None:
            return self._ask(path, self._deadline(), doing)
        when, file = self._recent.get(path, (-math.inf, None))
        if time.monotonic() - when > RECENT_SECONDS:
            file = self._ask(path, self._deadline(), doing)
            if len(self._recent) > KEPT_OBJECTS:
                self._recent.clear()
            self._recent[path] = time.monotonic(), file
        return file

    def _note(self, path: str, file: XetFile | None) -> None:
        """Something of this process's own doing, or just asked, that a follower need not wait to be told."""
        self._recent.pop(path, None)
        if self._view:
            self._view.note(path, file)

    def _name(self, path: str, file: XetFile, mtime: float, deadline: Deadline, doing: str) -> None:
        """Let a path stand for stored content; repeating it changes nothing."""
        operation = {"type": "addFile", "path": path, "xetHash": file.hash, "mtime": int(mtime * 1000)}
        if content_type := guess_type(path)[0]:
            operation["contentType"] = content_type
        if failed := self._batch(operation, deadline, doing):
            raise StoreError(doing, expected="success", got=failed, remedy="try again")
        self._note(path, file)

    def _batch(self, operation: dict[str, object], deadline: Deadline, doing: str) -> str:
        """Send one operation; why it failed, or nothing. The Hub may say 200 to a batch whose operations failed."""
        response = self._client.call(
            "POST", f"{self._client.api}/batch", deadline, doing=doing, expected=(200, 422),
            content=json.dumps(operation).encode() + b"\n", headers={"Content-Type": "application/x-ndjson"},
        )  # fmt: skip
        try:
            failed = "; ".join(str(failure)[:200] for failure in response.json().get("failed") or ())
            return failed or ("status 422" if response.status_code == 422 else "")
        except (ValueError, TypeError, AttributeError) as error:
            what = "which operations failed"
            raise StoreError(doing, expected=what, got="something else", remedy="look again, then decide") from error

    def _live_view(self) -> HubView | None:
        return self._view if self._view and self._view.answers else None


class _SmallObjects:
    """Small objects by content hash, so that polling costs nothing; believed once two downloads agreed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._objects: OrderedDict[str, tuple[bytes, bool]] = OrderedDict()

    def get(self, file: XetFile) -> bytes | None:
        with self._lock:
            data, believed = self._objects.get(file.hash, (b"", False))
            return data if believed else None

    def offer(self, file: XetFile, data: bytes) -> None:
        if len(data) > KEPT_OBJECT:
            return
        with self._lock:
            before = self._objects.pop(file.hash, None)
            self._objects[file.hash] = data, before is not None and before[0] == data
            if len(self._objects) > KEPT_OBJECTS:
                self._objects.popitem(last=False)
