"""A folder that the processes of one machine share, so that each object is downloaded once and read by all."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import re
import time
from collections.abc import Iterator
from io import BufferedRandom, BufferedReader
from pathlib import Path

from delta_sync.errors import IntegrityError, StoreError
from delta_sync.manifest import ObjectRef
from delta_sync.store.base import Store

MAX_BYTES = 64 * 1024**3
PIECE = 64 * 1024**2  # bytes read from a store at a time
WAIT_SECONDS, SLOWEST = 30.0, 4e6  # another's download is waited for so long, and a second more for so many bytes
_LOOK_SECONDS = 0.02  # between two looks at a lock
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
_WRITE = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_OURS = re.compile(r"[0-9a-f]{64}(\.part)?")
log = logging.getLogger(__name__)
File = BufferedReader | BufferedRandom


def default_folder() -> Path:
    """Where this user's caches lie: ``$XDG_CACHE_HOME/delta-sync``, or ``~/.cache/delta-sync``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "delta-sync"


class ObjectCache:
    """Objects by the sha256 that is expected of them, one file each, for any number of threads and processes.

    Whoever misses an object downloads it to ``{sha256}.part``, whose lock the others wait for; the system frees it when
    its holder dies. Files are hashed at every use, so nothing in the folder is trusted. Those used longest ago make
    room for new ones, so that ``max_bytes`` are kept; one in use is locked and stays.
    """

    def __init__(self, folder: str | Path, max_bytes: int = MAX_BYTES, *, wait: float = WAIT_SECONDS) -> None:
        self.folder, self.max_bytes, self._wait = Path(folder).expanduser(), max_bytes, wait
        self._said = False

    def read(self, ref: ObjectRef, store: Store) -> bytes:
        """One object's bytes, by way of the folder where that can be used, else from the store alone.

        Raises what the store raises; IntegrityError if the object there is not the one that ``ref`` promises.
        """
        if ref.size <= self.max_bytes:
            try:
                for _ in range(2):  # a damaged file is removed, and fetched again
                    with self._open(ref, store) as file:
                        if file is None:
                            break
                        data = file.read(ref.size + 1)
                        if hashlib.sha256(data).hexdigest() == ref.sha256:
                            return data
                        self._path(ref).unlink(missing_ok=True)
            except OSError as error:
                self._go_without(error)
        return _check(store.get(ref.key, max_bytes=ref.size), ref)

    @contextlib.contextmanager
    def file(self, ref: ObjectRef, store: Store) -> Iterator[Path]:
        """The path of a local file with one object's bytes, there until the end; StoreError if there can be none.

        Holds no more than a piece of it in memory; otherwise as ``read``.
        """
        with contextlib.ExitStack() as held:
            try:
                for _ in range(2):
                    file = held.enter_context(self._open(ref, store))
                    if file is None or hashlib.file_digest(file, "sha256").hexdigest() == ref.sha256:
                        break
                    self._path(ref).unlink(missing_ok=True)
                    file = None
            except OSError as error:
                remedy = "free space there, or name another folder"
                raise StoreError(f"cache {self.folder}", expected="room", got=error.strerror, remedy=remedy) from error
            if file is None:
                got, remedy = "another process that is still downloading it", "end that process, or try again"
                raise StoreError(f"object {ref.key} in {self.folder}", expected="its bytes", got=got, remedy=remedy)
            yield self._path(ref)

    # --- one object's file

    @contextlib.contextmanager
    def _open(self, ref: ObjectRef, store: Store) -> Iterator[BufferedReader | None]:
        """The object's file, not yet verified, kept from eviction; None while another downloads it for too long."""
        deadline = time.monotonic() + self._wait + ref.size / SLOWEST
        while (file := self._find(ref)) is None:
            if time.monotonic() > deadline:
                yield None
                return
            self._fetch(ref, store, deadline)
        with file:
            yield file

    def _find(self, ref: ObjectRef) -> BufferedReader | None:
        """The object's file, open, locked and marked as used now; None if there is none."""
        try:
            file = os.fdopen(os.open(self._path(ref), _READ), "rb")
        except FileNotFoundError:
            return None
        with contextlib.suppress(OSError):  # another user's, or a folder that may only be read
            os.utime(file.fileno())
        if _lock(file, fcntl.LOCK_SH, time.monotonic() + 1.0) and os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # evicted just now
        return None

    def _fetch(self, ref: ObjectRef, store: Store, deadline: float) -> None:
        """Download the object, or wait for the one who does; at the deadline, or if that one fails, there is none."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / f"{ref.sha256}.part"
        with os.fdopen(os.open(path, _WRITE, 0o644), "r+b") as part:
            if not _lock(part, fcntl.LOCK_EX, deadline) or not _is(part, path):
                return
            try:
                if not self._path(ref).exists():
                    self._make_room(ref.size)
                    _download(part, ref, store)
                    path.rename(self._path(ref))
            finally:
                if _is(part, path):
                    path.unlink()

    def _make_room(self, size: int) -> None:
        """Remove files that nobody uses, the one used longest ago first, until ``size`` more bytes fit."""
        files: list[tuple[os.stat_result, Path]] = []
        for entry in os.scandir(self.folder):
            with contextlib.suppress(FileNotFoundError):  # another process evicts too
                if _OURS.fullmatch(entry.name):
                    files.append((entry.stat(follow_symlinks=False), Path(entry)))
        over = sum(found.st_size for found, _ in files) + size - self.max_bytes
        for found, path in sorted(files, key=lambda file: file[0].st_mtime):
            if over <= 0:
                return
            with contextlib.suppress(OSError), os.fdopen(os.open(path, _READ), "rb") as file:
                if _lock(file, fcntl.LOCK_EX, 0.0) and _is(file, path):
                    path.unlink()
                    over -= found.st_size

    def _path(self, ref: ObjectRef) -> Path:
        return self.folder / ref.sha256

    def _go_without(self, error: OSError) -> None:
        if not self._said:
            self._said = True
            log.warning("going on without the cache in %s: %s", self.folder, error.strerror or error)


def _download(part: File, ref: ObjectRef, store: Store) -> None:
    """An object into its file, a piece at a time; IntegrityError if it is another."""
    part.truncate(ref.size)  # what others see of it when they make room
    digest = hashlib.sha256()
    for data in pieces(ref, store):
        digest.update(data)
        part.write(data)
    part.flush()
    _expect(ref, "sha256", ref.sha256, digest.hexdigest())


def pieces(ref: ObjectRef, store: Store) -> Iterator[bytes]:
    """An object's bytes, in order, ``PIECE`` at a time; IntegrityError if it has another size. Hashes nothing."""
    if ref.size <= PIECE:
        data = store.get(ref.key, max_bytes=ref.size)
        _expect(ref, "size", ref.size, len(data))
        yield data
        return
    _expect(ref, "size", ref.size, store.info(ref.key).size)
    for start in range(0, ref.size, PIECE):
        yield store.read_range(ref.key, start, min(PIECE, ref.size - start))


def _check(data: bytes, ref: ObjectRef) -> bytes:
    _expect(ref, "size", ref.size, len(data))
    _expect(ref, "sha256", ref.sha256, hashlib.sha256(data).hexdigest())
    return data


def _expect(ref: ObjectRef, what: str, expected: object, got: object) -> None:
    if got != expected:
        remedy = "fetch it again; if it stays, a trainer on this run heals it"
        raise IntegrityError(f"{what} of object {ref.key}", expected=expected, got=got, remedy=remedy)


def _lock(file: File, kind: int, deadline: float) -> bool:
    """Take a lock that the system frees when this process ends; False if others hold it until the deadline."""
    while True:
        try:
            fcntl.flock(file, kind | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() > deadline:
                return False
            time.sleep(_LOOK_SECONDS)


def _is(file: File, path: Path) -> bool:
    """Whether an open file is still the one at ``path``."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.lstat())
    except FileNotFoundError:
        return False
