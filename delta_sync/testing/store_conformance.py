"""The store contract as tests: subclass StoreConformance, give it a ``store`` fixture, run pytest."""

# ruff: noqa: D102 - a test's name says what it shows
from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from delta_sync.errors import ConflictError, FormatError, IntegrityError, NotFoundError
from delta_sync.store.base import Store

BAD_KEYS = [
    "", "/", "/a", "a/", "a//b", ".", "..", "../a", "a/..", "a/../b", "./a", "a/.", "a\\b", "a\0b", "a\nb", "\x7f",
    "x" * 256, "a/" * 600 + "a", "\ud800", ".delta-sync-tmp-1", "a/.delta-sync-tmp-1",
]  # fmt: skip
GOOD_KEYS = ["a", "a/b", "a/b-c.json", "..a", "a..b", ".hidden", "with space", "ü/ß", "x" * 255, "a=b&c%2F"]


class StoreConformance:
    """What every store must do; a subclass provides the fixture ``store``, empty and of its own for each test."""

    def test_put_then_get(self, store: Store) -> None:
        for data in (b"", b"x", bytes(range(256)) * 5000):
            store.put("a/b", data)
            assert store.get("a/b", max_bytes=len(data)) == data

    def test_put_takes_a_memoryview(self, store: Store) -> None:
        store.put("a", memoryview(b"0123456789")[2:5])
        assert store.get("a", max_bytes=10) == b"234"

    def test_put_replaces(self, store: Store) -> None:
        store.put("a", b"long old content")
        store.put("a", b"new")
        assert store.get("a", max_bytes=100) == b"new"
        assert store.info("a").size == 3

    def test_create_once(self, store: Store) -> None:
        store.create("a/b", b"first")
        with pytest.raises(ConflictError):
            store.create("a/b", b"second")
        with pytest.raises(ConflictError):
            store.create("a/b", b"first")
        assert store.get("a/b", max_bytes=10) == b"first"

    def test_create_after_put_and_after_delete(self, store: Store) -> None:
        store.put("a", b"1")
        with pytest.raises(ConflictError):
            store.create("a", b"2")
        store.delete("a")
        store.create("a", b"3")
        assert store.get("a", max_bytes=1) == b"3"

    def test_only_one_of_many_creates(self, store: Store) -> None:
        won: list[int] = []
        refused: list[int] = []

        def attempt(number: int) -> None:
            barrier.wait(10)
            try:
                store.create("race", b"%d" % number)
                won.append(number)
            except ConflictError:
                refused.append(number)

        barrier = threading.Barrier(8)
        _in_threads([lambda n=number: attempt(n) for number in range(8)])  # type: ignore[misc]
        assert len(won) == 1
        assert len(refused) == 7
        assert store.get("race", max_bytes=9) == b"%d" % won[0]

    def test_readers_see_whole_objects_only(self, store: Store) -> None:
        contents = [bytes([n]) * (200_000 + n * 10_000) for n in range(4)]
        whole = {hashlib.sha256(data).digest() for data in contents}
        store.put("a/b", contents[0])
        done = threading.Event()
        seen: list[bool] = []

        def read() -> None:
            while not done.is_set():
                seen.append(hashlib.sha256(store.get("a/b", max_bytes=10**6)).digest() in whole)

        def write() -> None:
            try:
                for n in range(40):
                    store.put("a/b", contents[n % 4])
            finally:
                done.set()

        _in_threads([read, read, write])
        assert seen
        assert all(seen)

    def test_put_file(self, store: Store, tmp_path: Path) -> None:
        source = tmp_path / "source"
        source.write_bytes(bytes(range(256)) * 100)
        store.put_file("a/file", source)
        assert store.get("a/file", max_bytes=10**6) == source.read_bytes()
        source.write_bytes(b"changed afterwards")
        assert store.info("a/file").size == 25600

    def test_get_is_bounded(self, store: Store) -> None:
        store.put("a", b"12345")
        with pytest.raises(IntegrityError):
            store.get("a", max_bytes=4)

    def test_read_range(self, store: Store) -> None:
        store.put("a", b"0123456789")
        assert store.read_range("a", 0, 10) == b"0123456789"
        assert store.read_range("a", 3, 4) == b"3456"
        assert store.read_range("a", 10, 0) == b""

    @pytest.mark.parametrize(("start", "length"), [(0, 11), (10, 1), (11, 0), (50, 5), (-1, 2), (3, -1)])
    def test_read_range_outside_the_object(self, store: Store, start: int, length: int) -> None:
        store.put("a", b"0123456789")
        with pytest.raises(IntegrityError):
            store.read_range("a", start, length)

    def test_missing(self, store: Store) -> None:
        store.put("there/it", b"is")
        for key in ("a", "a/b", "there"):  # "there" is a prefix, no object
            with pytest.raises(NotFoundError):
                store.get(key, max_bytes=1)
            with pytest.raises(NotFoundError):
                store.read_range(key, 0, 1)
            with pytest.raises(NotFoundError):
                store.info(key)
            store.delete(key)
        assert store.get("there/it", max_bytes=2) == b"is"

    def test_the_store_s_clock(self, store: Store) -> None:
        """When an object was written, where a store says it: about now, as the tests' machine and its clock are one."""
        store.put("a/b", b"x")
        written = store.written_at("a/b")
        assert written is None or abs(written - time.time()) < 60

    def test_delete(self, store: Store) -> None:
        store.put("a/b", b"1")
        store.delete("a/b")
        with pytest.raises(NotFoundError):
            store.info("a/b")
        assert list(store.list("")) == []

    def test_list_is_by_prefix_and_in_key_order(self, store: Store) -> None:
        keys = ["a-b", "a/b", "a/c/d", "a/c-d", "a0", "b/x", "b/y"]
        for number, key in enumerate(keys):
            store.put(key, b"x" * number)
        assert [(info.key, info.size) for info in store.list("")] == sorted(zip(keys, range(7), strict=True))
        assert [info.key for info in store.list("a/")] == ["a/b", "a/c-d", "a/c/d"]
        assert [info.key for info in store.list("a/c")] == ["a/c-d", "a/c/d"]
        assert [info.key for info in store.list("a")] == sorted(key for key in keys if key.startswith("a"))
        assert list(store.list("nothing/")) == []
        assert list(store.list("a/b/")) == []  # "a/b" is an object, not a folder

    def test_list_survives_changes_while_it_is_read(self, store: Store) -> None:
        for number in range(20):
            store.put(f"a/{number:02d}", b"")
        listing = iter(store.list("a/"))
        first = next(listing).key
        store.delete("a/10")
        store.put("a/99", b"")
        rest = [info.key for info in listing]
        assert {first, *rest} >= {f"a/{number:02d}" for number in range(20) if number != 10}

    @pytest.mark.parametrize("key", BAD_KEYS)
    def test_bad_keys_are_refused(self, store: Store, key: str, tmp_path: Path) -> None:
        (tmp_path / "source").write_bytes(b"x")
        calls: list[Callable[[], object]] = [
            lambda: store.put(key, b""),
            lambda: store.create(key, b""),
            lambda: store.put_file(key, tmp_path / "source"),
            lambda: store.get(key, max_bytes=1),
            lambda: store.read_range(key, 0, 0),
            lambda: store.info(key),
            lambda: store.delete(key),
        ]
        for call in calls:
            with pytest.raises(FormatError):
                call()

    @pytest.mark.parametrize("prefix", ["/", "../", "a/../", "..\\", "a//", "\0"])
    def test_bad_prefixes_are_refused(self, store: Store, prefix: str) -> None:
        with pytest.raises(FormatError):
            list(store.list(prefix))

    @pytest.mark.parametrize("key", GOOD_KEYS)
    def test_unusual_keys_are_kept_as_they_are(self, store: Store, key: str) -> None:
        store.put(key, b"1")
        assert store.get(key, max_bytes=1) == b"1"
        assert [info.key for info in store.list("")] == [key]

    def test_the_uri_is_text(self, store: Store) -> None:
        assert "://" in store.uri


def _in_threads(targets: list[Callable[[], object]]) -> None:
    """Run all at once; raise what any of them raised."""
    errors: list[BaseException] = []

    def guarded(target: Callable[[], object]) -> None:
        try:
            target()
        except BaseException as error:  # noqa: BLE001 - raised below, in the test's own thread
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,), daemon=True) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads), "a thread did not end within 60 s"
    if errors:
        raise errors[0]
