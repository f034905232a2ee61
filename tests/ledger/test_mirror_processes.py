"""Mirrors between stores of different kinds, in processes of their own that are killed, held up and failed."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest
from helpers.fault_proxy import WRITES, Fault, FaultProxy, sometimes
from helpers.moto_server import ENVIRONMENT, new_bucket
from object_writer import start
from test_object_store_runs import FAULTS, Replica
from tiny_run import TinyRun, follow

from delta_sync import StoreError
from delta_sync.fan_out import Options, fan_out
from delta_sync.ledger import Ledger
from delta_sync.mirror import Mirror
from delta_sync.store import LocalStore, open_store
from delta_sync.store.cache import ObjectCache

RUN = ("epochs/", "deltas/", "manifests/", "anchors/", "HEAD.json")


def content(store):
    return {info.key: store.get(info.key, max_bytes=1 << 20) for prefix in RUN for info in store.list(prefix)}


def a_run(store, folder, versions=3):
    run = TinyRun(store)
    run.origin()
    run.anchor(folder)
    for _ in range(versions - 1):
        run.delta()
    return run


def check_reader(run, store):
    ledger = Ledger(store)
    plan = ledger.plan(None, None)
    assert plan.target.sha256 == run.writer.head.sha256
    found = follow(ledger, plan, None)
    assert all((found[name] == run.now[name]).all() for name in run.now)


def mirror_once(source, target, cache):
    """What a process does: one mirror, until the copy is whole."""
    mirror = Mirror(open_store(source), open_store(target), ObjectCache(cache))
    for _ in range(20):
        try:
            if mirror.copy():
                return
        except StoreError:
            continue
    raise AssertionError(f"not whole after 20 passes: {mirror.damage}")


@pytest.mark.parametrize("chosen", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_a_mirror_killed_at_its_writes(moto, tmp_path, monkeypatch, chosen):
    """kill -9 before and after each write to the destination: what is there is whole versions, and the next goes on."""
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": moto}.items():
        monkeypatch.setenv(name, value)
    source = LocalStore(tmp_path / "source")
    run = a_run(source, tmp_path / "files")
    writes = killed_at(moto, source, tmp_path, None)[1]
    assert {key.partition("/")[0] for key in writes} == {
        ".delta-sync-tmp-create-only", "epochs", "manifests", "HEAD.json", "anchors", "deltas",
    }  # fmt: skip
    places = [(number, after) for number in range(len(writes)) for after in (False, True)]
    for number, after in places if chosen == "all" else places[7::14]:
        target, _ = killed_at(moto, source, tmp_path, (number, after))
        ledger = Ledger(target)
        head = ledger.head()
        for manifest in [head, *ledger.ancestors(head, 1)] if head else []:
            assert manifest.sha256 in run.bits, writes[number]
            for ref in manifest.objects:
                ledger.read_object(ref)
        if ledger.anchors():
            Replica(target).follow()
        mirror_once(source.uri, target.uri, str(tmp_path / "cache"))
        check_reader(run, target)
        assert content(target) == content(source)


def killed_at(moto, source, tmp_path, place):
    """A mirror process into a new bucket, killed at its n-th write, before or after the server got it."""
    target, seen, started = f"s3://{new_bucket(moto)}/run", [], threading.Event()

    def kill():
        started.wait(60)
        os.kill(process.pid, signal.SIGKILL)

    def rule(request):
        if request.method not in WRITES:
            return None
        seen.append(request.path.partition("/run/")[2].partition("?")[0])
        if place is None or len(seen) != place[0] + 1:
            return None
        return Fault(call=kill, drop=True, after=place[1])

    with FaultProxy(moto, rule) as proxy:
        environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}
        process = start(mirror_once, environment, source.uri, target, str(tmp_path / "cache"))
        started.set()
        process.join(120)
    assert process.exitcode == (0 if place is None else -signal.SIGKILL)
    return open_store(target), seen


def test_from_the_hub_to_a_folder_to_s3_while_a_tenth_of_all_calls_fail(
    hub, hub_bucket, moto, bucket, tmp_path, monkeypatch
):
    source = open_store(f"hf://buckets/{hub_bucket}/run")
    run = a_run(source, tmp_path / "files", 12)
    for kind, more in (("status", {"status": 503}), ("drop", {}), ("drop after", {}), ("flip", {})):
        hub.faults.add(kind, "", rate=0.025, **more)
    folder = LocalStore(tmp_path / "folder")
    mirror_once(source.uri, folder.uri, str(tmp_path / "cache"))
    hub.faults.clear()
    assert content(folder) == content(source)
    check_reader(run, folder)
    with FaultProxy(moto, sometimes(0.1, 5, FAULTS, {})) as proxy:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}.items():
            monkeypatch.setenv(name, value)
        mirror_once(folder.uri, f"s3://{bucket}/run", str(tmp_path / "cache"))
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    target = open_store(f"s3://{bucket}/run")
    assert content(target) == content(source)
    check_reader(run, target)


def test_from_s3_to_the_hub(hub, hub_bucket, proxy, bucket, tmp_path):
    run = a_run(open_store(f"s3://{bucket}/run"), tmp_path / "files")
    target = open_store(f"hf://buckets/{hub_bucket}/copy")
    assert Mirror(run.store, target, ObjectCache(tmp_path / "cache")).copy()
    assert content(target) == content(run.store)
    check_reader(run, target)


def test_what_a_mirror_costs_in_requests(proxy, moto, bucket, tmp_path):
    """The numbers of docs/STORES.md."""
    run = a_run(LocalStore(tmp_path / "source"), tmp_path / "files")
    bucket_uri = f"s3://{bucket}/run"
    onto = Mirror(run.store, open_store(bucket_uri), ObjectCache(tmp_path / "cache"), poll=1000)
    assert onto.copy()
    run.delta()
    proxy.requests.clear()
    assert onto.copy()
    assert proxy.counts() == {"GET": 1, "PUT": 3}
    away = Mirror(open_store(bucket_uri), LocalStore(tmp_path / "away"), ObjectCache(tmp_path / "cache"), poll=1000)
    assert away.copy()
    proxy.requests.clear()
    assert away.copy()
    assert proxy.counts() == {"GET": 2, "HEAD": 1}


def test_several_destinations_share_one_download_and_one_that_hangs_holds_up_no_other(proxy, bucket, tmp_path):
    run = a_run(LocalStore(tmp_path / "source"), tmp_path / "files")
    proxy.rule = lambda _: Fault(hang=30)
    counting = Counting(run.store)
    hung, stop = f"s3://{bucket}/hung", threading.Event()
    targets = {uri: (lambda uri=uri: open_store(uri)) for uri in (str(tmp_path / "a"), hung, str(tmp_path / "b"))}
    copies = fan_out(counting, targets, ObjectCache(tmp_path / "cache"), Options(poll=0.05), stop)
    try:
        until(lambda: [copy.line().state for copy in copies] == ["current", "copying", "current"])
        for _ in range(5):  # a trainer goes on while the mirror follows
            run.delta()
        until(lambda: [copy.line().version for copy in copies] == [8, None, 8])
        for name in ("a", "b"):
            check_reader(run, LocalStore(tmp_path / name))
        downloads = [key for key in counting.read if key.startswith("deltas/") or key.endswith(".safetensors")]
        assert sorted(downloads) == sorted(set(downloads)), "an object was downloaded twice"
        assert len(downloads) == 8
    finally:
        stop.set()
        proxy.rule = None


class Counting(LocalStore):
    def __init__(self, store):
        super().__init__(store.root)
        self.read = []

    def get(self, key, *, max_bytes):
        self.read.append(key)
        return super().get(key, max_bytes=max_bytes)


def until(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize("kind", ["deltas/", "anchors/"])
def test_large_objects_go_through_a_file_a_piece_at_a_time(tmp_path, monkeypatch, kind):
    """A store that would hand out an object whole refuses to: nothing large is ever held in memory."""
    monkeypatch.setattr("delta_sync.store.cache.PIECE", 64)
    run = a_run(LocalStore(tmp_path / "source"), tmp_path / "files")

    class Pieces(LocalStore):
        largest = 0

        def get(self, key, *, max_bytes):
            assert not key.startswith(kind) or key.endswith(".json"), "read whole"
            return super().get(key, max_bytes=max_bytes)

        def read_range(self, key, start, length):
            self.largest = max(self.largest, length)
            return super().read_range(key, start, length)

    source, target = Pieces(tmp_path / "source"), LocalStore(tmp_path / "target")
    assert Mirror(source, target, ObjectCache(tmp_path / "cache")).copy()
    assert source.largest == 64
    check_reader(run, target)
