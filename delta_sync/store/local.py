"""A store in a local folder, safe for several processes at once."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from delta_sync.errors import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.store.base import ObjectInfo, Store, check_range
from delta_sync.store.keys import TEMPORARY, check_key, check_prefix

STALE_SECONDS = 24 * 3600.0
_CLEANED: set[Path] = set()
_REMEDIES = {
    errno.ENOSPC: "free space in that file system, then try again",
    errno.EDQUOT: "raise the quota or free space, then try again",
    errno.EACCES: "give this process's user permission on the folder",
    errno.EPERM: "give this process's user permission on the folder",
    errno.EROFS: "mount the file system writable, or use another folder",
    errno.ENOTDIR: "use keys of which none is a folder of another",
    errno.EISDIR: "use keys of which none is a folder of another",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}
# A FIFO's open would wait for somebody who writes; a link may have been put there since the path was looked at.
_READ_AT_ONCE = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)


class LocalStore(Store):
    """One folder as a store.

    A write goes to a temporary file in the target's own folder, is fsynced, renamed over (put) or linked to (create)
    the target, and the folder is fsynced: a reader sees the old object or the whole new one, and what was written
    survives a power cut. Temporary files are in no listing; a process that opens the store removes those that are
    older than a day. The folder appears with the first write. Symbolic links below it are refused: they could leave it.
    """

    def __init__(self, path: str | Path) -> None:
        self.root = Path(path).expanduser().resolve()
        self.uri = f"file://{self.root}"
        if self.root not in _CLEANED:  # once in each process: looking through a long run's folders takes a while
            _CLEANED.add(self.root)
            _remove_stale(self.root)

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write or replace one object."""
        self._write(key, lambda file: _write_all(file, data), os.replace)

    def create(self, key: str, data: bytes | memoryview) -> None:
        """Write one object that must not exist yet; ConflictError if it does."""
        self._write(key, lambda file: _write_all(file, data), _link)

    def put_file(self, key: str, path: Path) -> None:
        """Write or replace one object with a local file's bytes."""
        with _explained(f"read {path}"), path.open("rb") as source:
            self._write(key, lambda file: shutil.copyfileobj(source, file, 1 << 22), os.replace)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """Read one object whole; IntegrityError if it is larger than ``max_bytes``."""
        with self._open(key) as file:
            size = os.fstat(file.fileno()).st_size
            if size > max_bytes:
                raise IntegrityError(f"size of object {key}", expected=f"at most {max_bytes} bytes", got=size)
            data = file.read(size)
        return _whole(key, 0, size, data)

    def read_range(self, key: str, start: int, length: int) -> bytes:
        """Read exactly ``length`` bytes from ``start``; IntegrityError if the object ends earlier."""
        with self._open(key) as file:
            check_range(key, os.fstat(file.fileno()).st_size, start, length)
            file.seek(start)
            data = file.read(length)
        return _whole(key, start, length, data)

    def info(self, key: str) -> ObjectInfo:
        """Size of one object."""
        path = self._path(key)
        with _explained(f"look at object {key} in {self.uri}"):
            found = path.stat()
        if not stat.S_ISREG(found.st_mode):
            raise NotFoundError(f"object {key} in {self.uri}", expected="a file", got="something else")
        return ObjectInfo(key, found.st_size)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Every object whose key starts with ``prefix``, in key order."""
        folder, slash, start = check_prefix(prefix).rpartition("/")
        top = self._path(folder) if folder else self.root
        with _explained(f"list {prefix}* in {self.uri}"):
            return iter(sorted(_scan(top, folder + slash, start), key=lambda info: info.key))

    def delete(self, key: str) -> None:
        """Remove one object; removing a missing one is not an error."""
        path = self._path(key)
        with contextlib.suppress(NotFoundError), _explained(f"delete object {key} in {self.uri}"):
            path.unlink()
            _sync_folder(path.parent)

    def written_at(self, key: str) -> float | None:
        """When an object was written, by the file system's clock."""
        with _explained(f"look at object {key} in {self.uri}"):
            return self._path(key).stat().st_mtime

    def _path(self, key: str) -> Path:
        path = self.root / check_key(key)
        real = os.path.realpath(path)
        if real != str(path):
            raise StoreError(
                f"object {key} in {self.uri}", expected="a path without symbolic links", got=real,
                remedy="put the real file or folder there instead of the link",
            )  # fmt: skip
        return path

    def _open(self, key: str) -> BinaryIO:
        path = self._path(key)
        what = f"object {key} in {self.uri}"
        with _explained(f"read {what}"):
            handle = os.open(path, _READ_AT_ONCE)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            os.close(handle)
            raise NotFoundError(what, expected="a file", got="something else")
        return os.fdopen(handle, "rb")

    def _write(self, key: str, fill: Callable[[BinaryIO], object], finish: Callable[[Path, Path], object]) -> None:
        path = self._path(key)
        with _explained(f"write object {key} in {self.uri}", reading=False):
            _make_folders(path.parent)
            temporary = path.parent / f"{TEMPORARY}{uuid.uuid4().hex}"
            try:
                with temporary.open("xb") as file:
                    fill(file)
                    file.flush()
                    os.fsync(file.fileno())
                finish(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(path.parent)


@contextlib.contextmanager
def _explained(doing: str, *, reading: bool = True) -> Iterator[None]:
    """Turn what the operating system says into our errors, with what to do about it."""
    try:
        yield
    except FileExistsError as error:
        raise ConflictError(doing, expected="no such object yet", got="one that exists") from error
    except OSError as error:
        if reading and error.errno in (errno.ENOENT, errno.EISDIR, errno.ENOTDIR):
            raise NotFoundError(doing, expected="an object", got=error.strerror) from error
        remedy = _REMEDIES.get(error.errno or 0, "try again; if it stays, look at that file system")
        raise StoreError(doing, expected="success", got=error.strerror or str(error), remedy=remedy) from error


def _write_all(file: BinaryIO, data: bytes | memoryview) -> None:
    file.write(data)


def _link(temporary: Path, path: Path) -> None:
    """Give the file its name only if nobody has it."""
    try:
        os.link(temporary, path)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise
        raise StoreError(
            f"create {path}",
            expected="a file system with hard links, which create-only writes need",
            got=error.strerror,
            remedy="put the store on a local file system such as ext4, xfs or apfs",
        ) from error


def _make_folders(folder: Path) -> None:
    """Create a folder and its missing parents, durably."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(exist_ok=True)
        _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot, and need not
            raise
    finally:
        os.close(handle)


def _scan(folder: Path, above: str, start: str) -> Iterator[ObjectInfo]:
    """Objects in ``folder``, whose key is ``above``, and in its subfolders; names must begin with ``start``."""
    try:
        entries = list(os.scandir(folder))
    except (FileNotFoundError, NotADirectoryError):
        return  # never written, or removed meanwhile: nothing there
    for entry in entries:
        if entry.name.startswith(TEMPORARY) or not entry.name.startswith(start):
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _scan(Path(entry.path), f"{above}{entry.name}/", "")
        elif entry.is_file(follow_symlinks=False):
            with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
                yield ObjectInfo(above + entry.name, entry.stat(follow_symlinks=False).st_size)


def _whole(key: str, start: int, length: int, data: bytes) -> bytes:
    """Objects are replaced, never shortened: a short read means that something else wrote to the file."""
    if len(data) != length:
        got = f"{len(data)} bytes from {start}"
        raise IntegrityError(f"object {key}", expected=f"{length} bytes", got=got, remedy="read it again")
    return data


def _remove_stale(root: Path) -> None:
    """Remove what writers killed more than a day ago left behind; a younger file may belong to a live one."""
    oldest = time.time() - STALE_SECONDS
    for path in root.rglob(f"{TEMPORARY}*"):
        with contextlib.suppress(OSError):  # a reader may lack the right, and another opener may be faster
            if path.lstat().st_mtime < oldest:
                path.unlink()
