"""Bytes to and from Xet, the Hub's content-addressed storage, through hf_xet with limits of our own."""

from __future__ import annotations

import io
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from hf_xet import (
    SKIP_SHA256,
    XetAuthenticationError,
    XetConfig,
    XetFileInfo,
    XetObjectNotFoundError,
    XetSession,
)
from huggingface_hub.utils import tqdm

from delta_sync.deadline import StillRunningError, within
from delta_sync.errors import StoreError
from delta_sync.store.attempts import Again, Deadline, retrying
from delta_sync.store.hub_client import HubClient

EMPTY = "0" * 64  # the hash of no bytes
SHOWN_FROM = 64 << 20  # bytes from which a file that is moved has a progress bar
_EARLY = 60.0  # seconds before its end at which a token is no longer used
_CONFIG = {
    "client.connect_timeout": "10s",
    "client.read_timeout": "20s",
    "client.retry_max_attempts": 2,
    "client.retry_base_delay": "200ms",
    "client.retry_max_duration": "20s",
    "telemetry.enabled": False,
}
_SOMETIMES = (OSError, RuntimeError, ValueError, OverflowError)  # what hf_xet raises; a ConnectionError is an OSError

Kind = Literal["read", "write"]


@dataclass(frozen=True)
class XetFile:
    """What a path of a bucket stands for: content by hash, and its size in bytes."""

    hash: str
    size: int


class GoneError(Exception):
    """The storage has no content under this hash (any more)."""


@dataclass(frozen=True)
class _Access:
    url: str
    token: str
    until: int
    group: Any = None  # for reading: the connections that this token opened


class XetTransfer:
    """Uploads and downloads of one bucket; the storage tokens that this takes are kept until shortly before their end.

    hf_xet does not verify what it downloads: whoever reads has to check a hash.
    """

    def __init__(self, client: HubClient) -> None:
        self._client = client
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._own: Any = None
        self._accesses: dict[Kind, _Access] = {}

    def upload(self, source: bytes | Path, deadline: Deadline, doing: str) -> XetFile:
        """Store bytes or a file's bytes; they have no path yet."""

        def attempt() -> XetFile:
            access = self._access("write", deadline, doing)
            with self._explained("write", deadline, doing), _shown(source, doing) as progress:
                commit = self._session().new_upload_commit(
                    endpoint=access.url, token=access.token, token_expiry_unix_secs=access.until,
                    progress_callback=progress,
                )  # fmt: skip
                try:
                    return within(deadline.left, lambda: _send(commit, source))
                except StillRunningError:
                    commit.abort()
                    raise

        return retrying(deadline, attempt)

    def read(self, file: XetFile, start: int, end: int, deadline: Deadline, doing: str) -> bytes:
        """Bytes ``start`` to ``end`` of a file; GoneError if the storage does not have it."""
        if start == end:
            return b""
        shown = file.size if end - start >= SHOWN_FROM // 8 else 0  # of a large file a large part
        window = (None, None) if (start, end) == (0, file.size) else (start, end)

        def attempt() -> bytes:
            access = self._access("read", deadline, doing)
            with self._explained("read", deadline, doing), _bar("download", shown, doing, start, end) as bar:
                stream = access.group.download_stream(XetFileInfo(file.hash, file.size), *window)
                data = within(deadline.left, lambda: _collect(stream, end - start, deadline, bar))
            if len(data) != end - start:
                raise Again(StoreError(doing, expected=f"{end - start} bytes", got=len(data), remedy="try again"))
            return data

        return retrying(deadline, attempt)

    def _access(self, kind: Kind, deadline: Deadline, doing: str) -> _Access:
        """A token for the storage, asked for once an hour or so."""
        self._session()
        access = self._accesses.get(kind)
        if access is None or access.until - time.time() < _EARLY:
            url = f"{self._client.api}/xet-{kind}-token"
            response = self._client.call("GET", url, deadline, doing=f"{doing}: {kind} token")
            try:
                answer = response.json()
                access = _Access(str(answer["casUrl"]), str(answer["accessToken"]), int(answer["exp"]))
            except (KeyError, TypeError, ValueError) as error:
                raise StoreError(doing, expected="an access token for Xet", got="something else") from error
            if kind == "read":
                with self._explained("read", deadline, doing):
                    group = self._session().new_download_stream_group(
                        endpoint=access.url, token=access.token, token_expiry_unix_secs=access.until
                    )
                access = _Access(access.url, access.token, access.until, group)
            self._accesses[kind] = access
        return access

    def _session(self) -> Any:
        """This process's session: one made before a fork would hang in the child."""
        with self._lock:
            if self._pid != os.getpid():
                self._pid, self._own, self._accesses = os.getpid(), None, {}
            if self._own is None:
                self._own = XetSession(XetConfig().with_config(_CONFIG))
            return self._own

    @contextmanager
    def _explained(self, kind: Kind, deadline: Deadline, doing: str) -> Iterator[None]:
        """Turn what hf_xet raises into our errors; most of it may pass."""
        try:
            yield
        except StillRunningError as error:
            raise _too_late(deadline, doing) from error
        except (XetAuthenticationError, *_SOMETIMES) as error:
            if isinstance(error, XetObjectNotFoundError) or "404 Not Found" in str(error):
                raise GoneError(str(error)) from error
            if isinstance(error, XetAuthenticationError) or "401 Unauthorized" in str(error):
                self._accesses.pop(kind, None)  # expired early: the next attempt asks for another
            raise Again(_failed(doing, error)) from error


def _send(commit: Any, source: bytes | Path) -> XetFile:
    with commit:
        if isinstance(source, Path):
            handle = commit.start_upload_file(str(source), sha256=SKIP_SHA256)
        else:
            handle = commit.start_upload_bytes(source, sha256=SKIP_SHA256)
    info = handle.result().xet_info
    return XetFile(info.hash, info.file_size)


def _collect(stream: Any, length: int, deadline: Deadline, bar: Any) -> bytes:
    """At most a little more than ``length`` bytes: a server that sends without end is not listened to."""
    buffer = io.BytesIO()  # hands its bytes out without another copy of what may be gigabytes
    for part in stream:
        buffer.write(part)
        if bar is not None:
            bar.update(len(part))
        if buffer.tell() > length or deadline.left <= 0:
            stream.cancel()
            break
    return buffer.getvalue()


def _failed(doing: str, error: BaseException) -> StoreError:
    got = f"{type(error).__name__}: {str(error)[:300]}"
    return StoreError(
        doing, expected="the storage's answer", got=got, remedy="try again; if it stays, check the network"
    )


def _too_late(deadline: Deadline, doing: str) -> StoreError:
    remedy = "try again; if it stays, check the network's speed"
    return StoreError(doing, expected=f"an end within {deadline.seconds:.0f} s", got="none", remedy=remedy)


@contextmanager
def _bar(which: str, size: int, doing: str, start: int = 0, end: int | None = None) -> Iterator[Any]:
    """A progress bar on a terminal for a large file, or None; HF_HUB_DISABLE_PROGRESS_BARS hides it.

    For a part of a file the bar is the whole file's, and only that of its last part stays.
    """
    if size < SHOWN_FROM:
        yield None
        return
    about = {"total": size, "initial": start, "unit": "B", "unit_scale": True, "desc": doing}
    with tqdm(**about, leave=end in (None, size), disable=None, name=f"delta_sync.{which}") as bar:  # type: ignore[no-untyped-call]
        yield bar


@contextmanager
def _shown(source: bytes | Path, doing: str) -> Iterator[Callable[..., None] | None]:
    """What an upload calls with its progress; None if it is too small to be shown."""
    size = source.stat().st_size if isinstance(source, Path) else len(source)
    with _bar("upload", size, doing) as bar:
        if bar is None:
            yield None
            return

        def progress(report: Any, _items: object = None) -> None:
            bar.update(max(0, report.total_bytes_completed - bar.n))

        yield progress
