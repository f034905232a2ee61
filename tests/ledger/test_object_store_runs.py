"""Whole runs on a bucket, over HTTP: faults, a writer killed between any two writes, two writers at once."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections import Counter

import pytest
from helpers.fault_proxy import WRITES, Fault, FaultProxy, sometimes, stripping
from helpers.fault_table import fault_table
from helpers.moto_server import ENVIRONMENT, new_bucket
from object_writer import publish, replicate, start
from tiny_run import TinyRun, changed, commit_delta, commit_origin, first_bits, follow, states

from delta_sync import ConflictError, IntegrityError, StoreError, state_digest
from delta_sync.ledger import Ledger
from delta_sync.store import open_store
from delta_sync.store.object import UNFENCED
from delta_sync.writer import Writer

CONFLICT = 17


class Replica:
    """Follows a run and proves every version that it takes."""

    def __init__(self, store) -> None:
        self.ledger, self.position, self.bits, self.order, self.followed = Ledger(store), None, None, (0, 0), []

    def follow(self) -> None:
        plan = self.ledger.plan(self.position, state_digest(states(self.bits)) if self.bits else None)
        if plan is not None:
            assert (plan.target.epoch, plan.target.version) > self.order
            self.bits = follow(self.ledger, plan, self.bits)
            self.position, self.order = plan.position, (plan.target.epoch, plan.target.version)
            self.followed += [manifest.sha256 for manifest in plan.deltas]


def chain(store):
    ledger = Ledger(store)
    head = ledger.head()
    return {manifest.sha256 for manifest in [head, *ledger.ancestors(head, 1)]} if head else set()


@pytest.fixture
def uri(bucket):
    return f"s3://{bucket}/runs/one"


def test_a_run_on_a_bucket(proxy, uri, tmp_path):
    run = TinyRun(open_store(uri))
    run.origin()
    run.anchor(tmp_path)
    early = Replica(open_store(uri))
    early.follow()
    for _ in range(5):
        run.delta()
        early.follow()
    late = Replica(open_store(uri))
    late.follow()
    for replica in (early, late):
        assert all((replica.bits[name] == run.now[name]).all() for name in run.now)


def test_requests_of_a_publish_and_of_an_idle_replica(proxy, uri, tmp_path):
    """The numbers of docs/STORES.md."""
    run = TinyRun(open_store(uri))
    run.origin()
    run.anchor(tmp_path)
    proxy.requests.clear()
    run.delta()
    assert proxy.counts() == {"GET": 5, "PUT": 3}
    replica = Replica(open_store(uri))
    replica.follow()
    proxy.requests.clear()
    for _ in range(10):
        replica.follow()
    assert proxy.counts() == {"GET": 20, "HEAD": 10}
    run.delta()
    proxy.requests.clear()
    replica.follow()
    counts = proxy.counts()  # the next version is looked for beside HEAD, and again if HEAD was the quicker
    assert counts["HEAD"] == 1 and counts["GET"] in (4, 5)


# --- kill -9 of the writer before and after each of its writes


def is_write(request):
    return request.method in WRITES


@pytest.fixture
def kill_proxy(moto):
    with FaultProxy(moto) as proxy:
        yield proxy


def run_to_its_end(uri, proxy, deltas, log=None, killed_at=None):
    """A writer process; ``killed_at``: at which of its writes, and whether the server still gets that one."""
    started = threading.Event()

    def kill():
        started.wait(60)
        os.kill(process.pid, signal.SIGKILL)

    if killed_at is not None:
        number, after = killed_at
        seen = [0]

        def rule(request):
            if not is_write(request):
                return None
            seen[0] += 1
            return Fault(call=kill, drop=True, after=after) if seen[0] == number + 1 else None

        proxy.rule = rule
    process = start(publish, {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}, uri, deltas, log)
    started.set()
    process.join(120)
    proxy.rule = None
    assert process.exitcode is not None, "the writer did not end within 120 s"
    return process.exitcode


@pytest.mark.parametrize("chosen", ["some", pytest.param("all", marks=pytest.mark.long)])
def test_a_writer_killed_at_any_of_its_writes(moto, kill_proxy, proxy, tmp_path, chosen):
    dry = f"s3://{new_bucket(moto)}/run"
    assert run_to_its_end(dry, kill_proxy, 1) == 0
    writes = [f"{r.method} {r.path.partition('/run/')[2][:30]}" for r in kill_proxy.requests if is_write(r)]
    kinds = {write.split()[1].partition("/")[0] for write in writes}
    assert kinds == {".delta-sync-tmp-create-only", "epochs", "manifests", "HEAD.json", "anchors", "deltas"}
    places = [(number, after) for number in range(len(writes)) for after in (False, True)]
    for number, after in places if chosen == "all" else places[3::7]:
        uri, log, write = f"s3://{new_bucket(moto)}/run", tmp_path / f"{number}-{after}", writes[number]
        assert run_to_its_end(uri, kill_proxy, 1, str(log), (number, after)) == -signal.SIGKILL, write
        recover(uri, log, tmp_path / f"files-{number}-{after}", write)


def recover(uri, log, folder, killed_at):
    """What a killed writer left is whole versions only; a replica follows it and then the next writer's."""
    store = open_store(uri)
    replica = Replica(store)
    before = chain(store)
    promised = {line.split()[1] for line in log.read_text().splitlines()} if log.exists() else set()
    assert promised <= before, f"killed at {killed_at}: a committed version was lost"
    assert len(before - promised) <= 1, f"killed at {killed_at}: more is visible than was being committed"
    if Ledger(store).anchors():
        replica.follow()
    run = TinyRun(open_store(uri))
    run.origin()
    run.anchor(folder)
    run.delta()
    replica.follow()
    assert before < chain(store), f"killed at {killed_at}: versions were lost on recovery"
    assert all((replica.bits[name] == run.now[name]).all() for name in run.now)


# --- two writers


def test_of_two_writers_started_together_exactly_one_goes_on(moto, proxy, uri, tmp_path):
    go = start.__globals__["_FORKS"].Event()
    environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": moto}
    logs = [tmp_path / "0", tmp_path / "1"]
    both = [start(publish, environment, uri, 20, str(log), go) for log in logs]
    deadline = time.monotonic() + 60
    while len(Ledger(open_store(uri)).epochs()) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    go.set()
    for process in both:
        process.join(120)
    assert sorted(process.exitcode for process in both) == [0, CONFLICT]
    loser = next(log for log, process in zip(logs, both, strict=True) if process.exitcode == CONFLICT)
    assert not loser.exists(), "the loser was promised a version"
    check_one_chain(uri, {line.split()[1] for log in logs if log.exists() for line in log.read_text().splitlines()})


def test_claims_made_at_once_are_never_shared(proxy, uri):
    stores = [open_store(uri) for _ in range(6)]
    writers = []
    threads = [threading.Thread(target=lambda s=s: writers.append(Writer.open(Ledger(s)))) for s in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert sorted(writer.epoch for writer in writers) == [1, 2, 3, 4, 5, 6]
    for writer in writers:
        if writer.epoch < 6:
            with pytest.raises(ConflictError):
                commit_origin(writer, first_bits())
        else:
            commit_origin(writer, first_bits())


def test_without_create_only_writes_nobody_begins(proxy, uri):
    proxy.rule = stripping("If-None-Match")
    with pytest.raises(StoreError, match="ignores If-None-Match"):
        Writer.open(Ledger(open_store(uri)))
    assert Ledger(open_store(uri)).epochs() == []


def test_without_create_only_writes_a_second_writer_is_detected_where_the_user_wants_that(
    proxy, uri, monkeypatch, tmp_path
):
    proxy.rule = stripping("If-None-Match")
    monkeypatch.setenv(UNFENCED, "1")
    first = TinyRun(open_store(uri))
    first.origin()
    first.anchor(tmp_path / "1")
    replica = Replica(open_store(uri))
    replica.follow()
    second = TinyRun(open_store(uri))
    with pytest.raises(ConflictError, match="second publisher"):
        first.delta()
    second.origin()
    second.anchor(tmp_path / "2")
    second.delta()
    replica.follow()
    assert all((replica.bits[name] == second.now[name]).all() for name in second.now)


def check_one_chain(uri, promised):
    store = open_store(uri)
    seen = chain(store)
    assert promised == seen
    replica = Replica(store)
    replica.follow()
    assert replica.position.version == len(seen)


# --- faults

FAULTS = [
    Fault(status=500, code="InternalError"), Fault(status=503, code="SlowDown"), Fault(drop=True),
    Fault(drop=True, after=True), Fault(status=500, code="InternalError", after=True), Fault(truncate=20),
    Fault(flip=True),
]  # fmt: skip


@pytest.mark.parametrize(("many", "versions"), [(4, 20), pytest.param(16, 50, marks=pytest.mark.long)])
def test_reader_processes_while_a_tenth_of_all_requests_fail(
    moto, uri, bucket, tmp_path, monkeypatch, capsys, many, versions
):
    """Prints how often which fault came, and what the replicas had to try again."""
    counted: dict[str, int] = {}
    logs = [tmp_path / f"{number}.json" for number in range(many)]
    with FaultProxy(moto, sometimes(0.1, 11, FAULTS, counted)) as proxy:
        environment = {**ENVIRONMENT, "AWS_ENDPOINT_URL": proxy.url}
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        readers = [start(replicate, environment, uri, str(log), versions, 400.0) for log in logs]
        run = TinyRun(store := open_store(uri))
        promised = [until_done(run.origin)]
        until_done(lambda: run.anchor(tmp_path / "files"))
        for number in range(versions - 1):
            after = changed(run.now, number)
            promised.append(
                until_done(lambda after=after, number=number: commit_delta(run.writer, run.now, after, number))
            )
            run.now = after
        for reader in readers:
            reader.join(420)
        assert [reader.exitcode for reader in readers] == [0] * many
    monkeypatch.setenv("AWS_ENDPOINT_URL", moto)
    assert chain(open_store(store.uri)) == {manifest.sha256 for manifest in promised}
    facts = [json.loads(log.read_text()) for log in logs]
    for fact in facts:
        assert fact["state"] == state_digest(states(run.now))
        places = [place for _, _, place in fact["followed"]]
        assert places == sorted(set(places)) and places[-1] == versions
        steps = [version for _, taken, _ in fact["followed"] for version in taken]
        assert steps == sorted(set(steps)), "a version was taken twice"
        assert fact["slowest"] < 90
    tried_again = sum((Counter(fact["errors"]) for fact in facts), Counter())
    slowest = max(fact["slowest"] for fact in facts)
    title = f"{many} readers, {versions} versions, {len(proxy.requests)} requests to S3, slowest look {slowest:.1f} s"
    with capsys.disabled():
        print(fault_table(title, counted, tried_again))


def until_done(act):
    for _ in range(8):
        try:
            return act()
        except (StoreError, IntegrityError):
            continue
    raise AssertionError("one step must not need so many attempts")
