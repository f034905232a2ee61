"""The cache that ranks and engines of one machine share: one download, in real processes, whatever happens to one."""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import signal
import threading
import time

import pytest
from cache_process import FORKS, start
from helpers.fault_proxy import Fault
from helpers.moto_server import ENVIRONMENT

from delta_sync import IntegrityError, NotFoundError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import ObjectRef
from delta_sync.store import LocalStore, open_store
from delta_sync.store.cache import ObjectCache

SIZE = 100_000


class Counting(LocalStore):
    """Counts what is read from it."""

    def __init__(self, path):
        super().__init__(path)
        self.reads = []

    def get(self, key, *, max_bytes):
        self.reads.append(key)
        return super().get(key, max_bytes=max_bytes)


def put(store, key, data):
    store.put(key, data)
    return ObjectRef(key, len(data), hashlib.sha256(data).hexdigest())


@pytest.fixture
def store(tmp_path):
    return Counting(tmp_path / "store")


@pytest.fixture
def cache(tmp_path):
    return ObjectCache(tmp_path / "cache")


@pytest.fixture
def refs(store):
    return [put(store, f"objects/{number}", bytes([number]) * SIZE) for number in range(6)]


def files(cache):
    return sorted(path.name for path in cache.folder.iterdir())


def test_the_second_read_does_not_ask_the_store(store, cache, refs):
    for _ in range(3):
        assert cache.read(refs[1], store) == b"\1" * SIZE
    assert store.reads == ["objects/1"]
    assert files(cache) == [refs[1].sha256]


def test_it_is_named_by_content_so_another_key_with_the_same_bytes_is_there_too(store, cache, refs):
    cache.read(refs[1], store)
    assert cache.read(ObjectRef("anchors/elsewhere", SIZE, refs[1].sha256), store) == b"\1" * SIZE
    assert store.reads == ["objects/1"]


@pytest.mark.parametrize("damage", [b"", b"\1" * (SIZE - 1) + b"\2", b"\1" * (SIZE + 1)])
def test_a_damaged_file_is_removed_and_fetched_again(store, cache, refs, damage):
    cache.read(refs[1], store)
    (cache.folder / refs[1].sha256).write_bytes(damage)
    assert cache.read(refs[1], store) == b"\1" * SIZE
    assert store.reads == ["objects/1"] * 2
    with cache.file(refs[1], store) as path:
        path.write_bytes(damage)
    with cache.file(refs[1], store) as path:
        assert path.read_bytes() == b"\1" * SIZE
    assert store.reads == ["objects/1"] * 3


def test_what_is_damaged_in_the_store_is_an_error_and_never_kept(store, cache, refs):
    store.put("objects/1", b"\2" * SIZE)
    for read in (cache.read, lambda ref, store: cache.file(ref, store).__enter__()):
        with pytest.raises(IntegrityError, match="sha256 of object objects/1"):
            read(refs[1], store)
    store.put("objects/1", b"\1" * (SIZE + 1))
    with pytest.raises(IntegrityError):
        cache.read(refs[1], store)
    store.delete("objects/1")
    with pytest.raises(NotFoundError):
        cache.read(refs[1], store)
    assert files(cache) == []


def test_the_files_used_longest_ago_make_room_and_one_in_use_stays(store, cache, refs):
    small = ObjectCache(cache.folder, 3 * SIZE)
    for ref in refs[:3]:
        small.read(ref, store)
        time.sleep(0.01)
    small.read(refs[0], store)
    with small.file(refs[1], store):  # now 2 was used longest ago, and 1 is in use
        small.read(refs[3], store)
        assert files(small) == sorted(ref.sha256 for ref in (refs[0], refs[1], refs[3]))
        small.read(refs[4], store)
        small.read(refs[5], store)
        assert refs[1].sha256 in files(small)
    assert sum(path.stat().st_size for path in small.folder.iterdir()) <= 3 * SIZE
    small.read(refs[0], store)
    assert len(files(small)) == 3


def test_an_object_larger_than_the_cache_is_read_without_it(store, tmp_path, refs):
    small = ObjectCache(tmp_path / "small", SIZE - 1)
    assert small.read(refs[1], store) == b"\1" * SIZE
    assert not small.folder.exists()


def test_other_people_s_files_in_the_folder_are_left_alone(store, cache, refs):
    cache.folder.mkdir()
    (cache.folder / "precious.txt").write_bytes(bytes(10 * SIZE))
    small = ObjectCache(cache.folder, 2 * SIZE)
    for ref in refs:
        small.read(ref, store)
    assert "precious.txt" in files(small)
    assert len(files(small)) == 3


def test_a_folder_that_cannot_be_used_is_said_once_and_gone_without(store, tmp_path, refs, caplog):
    (tmp_path / "file").write_text("not a folder")
    cache = ObjectCache(tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING):
        for ref in refs:
            assert len(cache.read(ref, store)) == SIZE
    assert [record.message.partition(":")[0] for record in caplog.records] == [
        f"going on without the cache in {cache.folder}"
    ]
    with pytest.raises(StoreError, match="name another folder"), cache.file(refs[0], store):
        pass


def test_a_full_disk_is_said_once_and_gone_without(store, cache, refs, tmp_path):
    process = start({}, str(store.root), str(cache.folder), refs, str(tmp_path / "log"), SIZE // 2)
    process.join(60)
    assert process.exitcode == 0
    assert len((tmp_path / "log").read_text().splitlines()) == len(refs)
    said = (tmp_path / "log.log").read_text().splitlines()
    assert len(said) == 1 and "going on without the cache" in said[0]
    assert files(cache) == []


def test_who_waits_too_long_downloads_for_itself(store, tmp_path, refs):
    cache = ObjectCache(tmp_path / "cache", wait=0.2)
    cache.folder.mkdir()
    with (cache.folder / f"{refs[1].sha256}.part").open("wb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        began = time.monotonic()
        assert cache.read(refs[1], store) == b"\1" * SIZE
        assert 0.2 < time.monotonic() - began < 5
        with pytest.raises(StoreError, match="still downloading"), cache.file(refs[1], store):
            pass


def test_threads_share_a_download(store, cache, refs):
    got = []
    threads = [threading.Thread(target=lambda: got.append(cache.read(refs[2], store))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert got == [b"\2" * SIZE] * 8
    assert store.reads == ["objects/2"]


# --- processes, on a bucket


@pytest.fixture
def uri(bucket):
    return f"s3://{bucket}/run"


@pytest.fixture
def environment(proxy):
    return {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}


def gets(proxy):
    return [request.path for request in proxy.requests if request.method == "GET"]


def test_eight_processes_download_each_object_once(proxy, environment, uri, cache, tmp_path):
    store = open_store(uri)
    refs = [put(store, f"deltas/{number}", os.urandom(SIZE)) for number in range(5)]
    proxy.requests.clear()
    go = FORKS.Event()
    logs = [str(tmp_path / f"log-{number}") for number in range(8)]
    processes = [start(environment, uri, str(cache.folder), refs, log, None, go) for log in logs]
    go.set()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * 8
    assert len(gets(proxy)) == len(set(gets(proxy))) == len(refs)


def test_a_downloader_that_is_killed_is_followed_by_the_next_at_once(proxy, environment, uri, cache, tmp_path):
    ref = put(open_store(uri), "deltas/1", os.urandom(SIZE))
    asked, hangs = threading.Event(), [120.0]
    proxy.rule = lambda r: Fault(hang=hangs.pop(), call=None) if hangs and not asked.set() else None
    first = start(environment, uri, str(cache.folder), [ref], str(tmp_path / "first"))
    assert asked.wait(60)
    assert files(cache) == [f"{ref.sha256}.part"]
    others = [start(environment, uri, str(cache.folder), [ref], str(tmp_path / f"{k}")) for k in range(3)]
    time.sleep(1.0)
    assert len(gets(proxy)) == 1, "the others wait"
    os.kill(first.pid, signal.SIGKILL)
    killed = time.monotonic()
    for process in others:
        process.join(60)
    assert time.monotonic() - killed < 20, "less than the deadline for a living one"
    assert [process.exitcode for process in others] == [0] * 3
    assert len(gets(proxy)) == 2
    assert files(cache) == [ref.sha256]


def test_at_the_hub_a_second_process_costs_no_resolver_call(hub, hub_bucket, cache, tmp_path):
    uri = f"hf://buckets/{hub_bucket}/run"
    ref = put(open_store(uri), "deltas/1", os.urandom(SIZE))
    environment = {name: os.environ[name] for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HOME", "HF_XET_CACHE")}
    counts = []
    for number in range(2):
        hub.forget()
        process = start(environment, uri, str(cache.folder), [ref], str(tmp_path / f"log-{number}"))
        process.join(60)
        assert process.exitcode == 0
        counts.append(hub.counts())
    assert counts[0]["resolver"] == 1 and counts[0]["cas"] > 0
    assert not counts[1]


def test_a_ledger_reads_by_way_of_it(store, cache, refs):
    ledger = Ledger(store, cache=cache)
    for _ in range(2):
        assert ledger.read_object(refs[3]) == b"\3" * SIZE
    assert store.reads == ["objects/3"]
