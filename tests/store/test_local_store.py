"""What only a folder can get wrong: crashes, disks, permissions, links."""

from __future__ import annotations

import errno
import os
import time
from pathlib import Path

import pytest

from delta_sync import ConflictError, IntegrityError, NotFoundError, StoreError
from delta_sync.store import LocalStore
from delta_sync.store.keys import TEMPORARY


@pytest.fixture
def store(tmp_path):
    return LocalStore(tmp_path)


def failing(code):
    def fail(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    return fail


def names(folder):
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize("when", ["fsync", "replace", "write"])
def test_a_crash_before_the_rename_leaves_the_old_object(store, tmp_path, monkeypatch, when):
    store.put("a/b", b"old")

    class Killed(BaseException):
        pass

    def kill(*args, **kwargs):
        raise Killed

    monkeypatch.setattr(os, "replace" if when == "replace" else "fsync", kill)
    if when == "write":
        monkeypatch.setattr("delta_sync.store.local._write_all", kill)
    with pytest.raises(Killed):
        store.put("a/b", b"new")
    monkeypatch.undo()
    assert store.get("a/b", max_bytes=9) == b"old"
    assert names(tmp_path) == ["b"]


def test_the_data_is_synced_before_the_name_and_the_name_after(store, monkeypatch):
    calls = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(handle):
        calls.append("sync folder" if os.path.isdir(f"/proc/self/fd/{handle}") else "sync file")  # noqa: PTH112
        real_fsync(handle)

    def replace(source, target):
        calls.append("rename")
        real_replace(source, target)

    store.put("a/first", b"")  # creates the folder
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    store.put("a/b", b"data")
    assert calls == ["sync file", "rename", "sync folder"]


def test_new_folders_are_synced_into_their_parents(store, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda handle: synced.append(str(Path(f"/proc/self/fd/{handle}").readlink())))
    store.put("x/y/z", b"")
    assert {str(tmp_path), str(tmp_path / "x"), str(tmp_path / "x/y")} <= set(synced)


@pytest.mark.parametrize(
    ("code", "remedy"),
    [(errno.ENOSPC, "free space"), (errno.EDQUOT, "quota"), (errno.EROFS, "writable"), (errno.EIO, "try again")],
)
def test_a_failing_disk_is_a_store_error_that_says_what_to_do(store, tmp_path, monkeypatch, code, remedy):
    store.put("a", b"old")
    monkeypatch.setattr("delta_sync.store.local._write_all", failing(code))
    for write in (store.put, store.create):
        with pytest.raises(StoreError, match=remedy) as caught:
            write("a", b"new")
        assert caught.value.got == os.strerror(code)
        assert not isinstance(caught.value, NotFoundError)
    monkeypatch.undo()
    assert store.get("a", max_bytes=9) == b"old"
    assert names(tmp_path) == ["a"]


def test_a_full_disk_for_real():
    """/dev/full answers ENOSPC to every write: the error must come out of put itself, not out of a later flush."""
    from delta_sync.store.local import _explained, _write_all

    with (
        pytest.raises(StoreError, match="free space"),
        _explained("write", reading=False),
        Path("/dev/full").open("wb", buffering=0) as file,
    ):
        _write_all(file, b"x")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission(store, tmp_path):
    (tmp_path / "a").mkdir(mode=0o500)
    with pytest.raises(StoreError, match="permission"):
        store.put("a/b", b"")


def test_permission_refused_by_the_system(store, monkeypatch):
    monkeypatch.setattr("pathlib.Path.open", failing(errno.EACCES))
    with pytest.raises(StoreError, match="permission"):
        store.get("a", max_bytes=1)


@pytest.mark.parametrize("code", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_links_is_refused_clearly(store, tmp_path, monkeypatch, code):
    monkeypatch.setattr(os, "link", failing(code))
    with pytest.raises(StoreError, match="hard links"):
        store.create("a", b"")
    assert names(tmp_path) == []


def test_an_object_is_no_folder_for_others(store):
    store.put("a", b"1")
    with pytest.raises(StoreError, match="none is a folder of another"):
        store.put("a/b", b"2")
    with pytest.raises(NotFoundError):
        store.get("a/b", max_bytes=1)
    store.put("c/d", b"3")
    with pytest.raises(StoreError, match="none is a folder of another"):
        store.put("c", b"4")
    with pytest.raises(ConflictError):
        store.create("c", b"4")


def test_links_that_leave_the_store_are_refused(store, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    (outside / "secret").write_bytes(b"s")
    (store.root / "folder").symlink_to(outside)
    (store.root / "file").symlink_to(outside / "secret")
    for key in ("folder/secret", "file"):
        with pytest.raises(StoreError, match="symbolic links"):
            store.get(key, max_bytes=9)
        with pytest.raises(StoreError, match="symbolic links"):
            store.put(key, b"overwritten")
        with pytest.raises(StoreError, match="symbolic links"):
            store.delete(key)
    with pytest.raises(StoreError, match="symbolic links"):
        list(store.list("folder/"))
    assert list(store.list("")) == []
    assert (outside / "secret").read_bytes() == b"s"


@pytest.mark.parametrize(
    "key", ["HEAD.json", "manifests/1.json", "epochs/1.json", "anchors/1/anchor.json", "replicas/east.json", "deltas/x"]
)
@pytest.mark.parametrize("level", ["file", "folder"])
def test_links_in_a_run_are_neither_read_nor_written_nor_listed(store, tmp_path_factory, key, level):
    """Whoever may write into the folder of a run must not make a replica read, or a trainer write, elsewhere."""
    outside = tmp_path_factory.mktemp("outside")
    (outside / key).parent.mkdir(parents=True, exist_ok=True)
    (outside / key).write_bytes(b"secret")
    here = store.root / (key if level == "file" else key.partition("/")[0])
    here.parent.mkdir(parents=True, exist_ok=True)
    here.symlink_to(outside / here.relative_to(store.root))
    for touch in (
        lambda: store.get(key, max_bytes=99),
        lambda: store.read_range(key, 0, 1),
        lambda: store.info(key),
        lambda: store.put(key, b"overwritten"),
        lambda: store.create(key, b"overwritten"),
        lambda: store.delete(key),
    ):
        with pytest.raises(StoreError, match="symbolic links"):
            touch()
    assert list(store.list("")) == []
    assert (outside / key).read_bytes() == b"secret"


def test_a_link_put_there_in_between_is_not_followed(store, tmp_path_factory, monkeypatch):
    """Between the look at the path and the open: the race that a look alone would lose."""
    secret = tmp_path_factory.mktemp("outside") / "secret"
    secret.write_bytes(b"s")
    store.put("a", b"1")
    real = os.open

    def swapped(path, *args, **more):
        if str(path) == str(store.root / "a"):
            (store.root / "a").unlink()
            (store.root / "a").symlink_to(secret)
        return real(path, *args, **more)

    monkeypatch.setattr(os, "open", swapped)
    with pytest.raises(StoreError):
        store.get("a", max_bytes=9)


def test_old_temporary_files_behind_a_link_are_left_alone(tmp_path, monkeypatch):
    outside, root = tmp_path / "outside", tmp_path / "root"
    outside.mkdir()
    root.mkdir()
    theirs = outside / f"{TEMPORARY}x"
    theirs.write_bytes(b"")
    os.utime(theirs, (0, 0))
    (root / "folder").symlink_to(outside)
    LocalStore(root)
    assert theirs.exists()


def test_the_store_itself_may_lie_behind_a_link(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    LocalStore(tmp_path / "link").put("a", b"1")
    assert LocalStore(tmp_path / "real").get("a", max_bytes=1) == b"1"


def test_temporary_files_are_invisible_and_go_after_a_day(store, tmp_path, monkeypatch):
    store.put("a/b", b"1")
    young, old = tmp_path / "a" / f"{TEMPORARY}young", tmp_path / "a" / f"{TEMPORARY}old"
    for path, age in ((young, 3600), (old, 25 * 3600)):
        path.write_bytes(b"half an obj")
        os.utime(path, (time.time() - age,) * 2)
    assert [info.key for info in store.list("")] == ["a/b"]
    LocalStore(tmp_path)
    assert old.exists()  # this process has looked already
    monkeypatch.setattr("delta_sync.store.local._CLEANED", set())
    LocalStore(tmp_path)
    assert young.exists()
    assert not old.exists()


def test_what_shrinks_while_it_is_read_is_an_integrity_error(store, monkeypatch):
    store.put("a", b"12345")
    real = os.fstat

    looks = []

    def shrink_after_looking(handle):
        found = real(handle)
        looks.append(handle)
        if len(looks) == 2:  # the first look is at its kind
            os.truncate(store.root / "a", 2)
        return found

    monkeypatch.setattr(os, "fstat", shrink_after_looking)
    with pytest.raises(IntegrityError, match="read it again"):
        store.get("a", max_bytes=9)


def test_objects_get_the_usual_permissions(store, tmp_path):
    umask = os.umask(0o027)
    try:
        store.put("a", b"")
    finally:
        os.umask(umask)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o640


@pytest.mark.timeout(20)
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir])
def test_what_is_no_file_is_no_object_and_never_waited_for(store, make):
    make(store.root / "a")
    for read in (lambda: store.get("a", max_bytes=9), lambda: store.read_range("a", 0, 1), lambda: store.info("a")):
        with pytest.raises(NotFoundError):
            read()
