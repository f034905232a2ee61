"""Buckets as the Hub keeps them: files by path, and a log of what changed."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any


def as_date(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%f")[:-3] + "Z"


@dataclass(frozen=True)
class File:
    """One file of a bucket; its bytes lie in the Xet storage under ``xet_hash``."""

    path: str
    size: int
    xet_hash: str
    mtime: float
    uploaded: float

    def row(self) -> dict[str, Any]:
        return {
            "type": "file", "path": self.path, "size": self.size, "xetHash": self.xet_hash,
            "mtime": as_date(self.mtime), "uploadedAt": as_date(self.uploaded),
        }  # fmt: skip


@dataclass
class Bucket:
    """One bucket; ``changed`` is notified with every change."""

    id: str
    private: bool = False
    created: float = field(default_factory=time.time)
    updated: float = field(default_factory=time.time)
    files: dict[str, File] = field(default_factory=dict)
    log: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    forgotten: int = 0  # log entries no longer replayed
    changed: threading.Condition = field(default_factory=threading.Condition)

    def info(self) -> dict[str, Any]:
        files = list(self.files.values())
        return {
            "id": self.id, "private": self.private, "createdAt": as_date(self.created),
            "updatedAt": as_date(self.updated), "size": sum(f.size for f in files), "totalFiles": len(files),
        }  # fmt: skip

    def put(self, path: str, size: int, xet_hash: str, mtime: float) -> None:
        with self.changed:
            now, old = time.time(), self.files.get(path)
            self.files[path] = file = File(path, size, xet_hash, mtime, now)
            row = {key: value for key, value in file.row().items() if key != "type"}
            self._note({"op": "update" if old else "add", **row})

    def remove(self, path: str) -> bool:
        with self.changed:
            if self.files.pop(path, None) is None:
                return False
            self._note({"op": "delete", "path": path})
            return True

    def under(self, prefix: str, at: float | None = None) -> list[File]:
        """The files whose path starts so, in path order; ``at``: as they were at that time."""
        with self.changed:
            files = list(self.files.values())
        found = (f for f in files if f.path.startswith(prefix) and (at is None or f.uploaded <= at))
        return sorted(found, key=lambda f: f.path)

    def events(self, cursor: int | None, since: float | None, end: threading.Event) -> Iterator[str]:
        """Server-sent events, replayed from a cursor or a time and then as they happen, until ``end`` is set."""
        with self.changed:
            at = len(self.log)
            if cursor is not None:
                at = cursor
            elif since is not None:
                at = next((i for i, (when, _) in enumerate(self.log) if when >= since), at)
            if at < self.forgotten and (cursor is not None or since is not None):
                yield "event: reset\ndata: {}\n\n"
                return
        ready, pinged = False, time.monotonic()
        while not end.is_set():
            with self.changed:
                if ready and at >= len(self.log):
                    self.changed.wait(0.2)
                if end.is_set():
                    return
                rows, at = [row for _, row in self.log[at:]], len(self.log)
            if rows:
                yield f"event: changes\ndata: {json.dumps({'cursor': str(at), 'changes': rows})}\n\n"
            if not ready:
                yield f"event: ready\ndata: {json.dumps({'cursor': str(at)})}\n\n"
                ready = True
            if time.monotonic() - pinged > 1.0:
                pinged = time.monotonic()
                yield ": ping\n\n"

    def _note(self, row: dict[str, Any]) -> None:
        self.updated = time.time()
        self.log.append((self.updated, row))
        self.changed.notify_all()
