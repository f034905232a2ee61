"""A run in a bucket of the test Hub: what it costs, several reader processes with faults, two trainers at once."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from helpers.fault_table import fault_table
from tiny_run import TinyRun, states

from delta_sync import ConflictError, StoreError, state_digest
from delta_sync.ledger import Ledger
from delta_sync.mirror import Mirror
from delta_sync.plan import Position
from delta_sync.store import open_store
from delta_sync.store.cache import ObjectCache
from delta_sync.writer import Writer

READER = Path(__file__).parent / "hub_reader.py"
ALL_FAULTS = (
    ("status", {"status": 500}),
    ("status", {"status": 503}),
    ("status", {"status": 429, "headers": {"Retry-After": "0.2"}}),
    ("drop", {}),
    ("drop after", {}),
    ("delay", {"seconds": 0.3}),
    ("flip", {}),
)


@pytest.fixture
def uri(hub_bucket):
    return f"hf://buckets/{hub_bucket}/run"


@pytest.fixture
def replica(uri):
    store = open_store(uri)
    store.follow()
    end = time.monotonic() + 60
    while not store._view.answers:
        assert time.monotonic() < end
        time.sleep(0.01)
    yield store
    store.close()


def test_what_a_publish_and_a_replica_cost(hub, uri, replica):
    """The numbers of docs/STORES-HUB.md, counted at the Hub."""
    run = TinyRun(open_store(uri))
    run.origin()
    run.delta()
    hub.forget()
    run.delta()
    published = hub.counts()
    assert (published["api"], published["resolver"]) == (4, 6), published

    ledger = Ledger(replica)
    position = None
    while position is None or position.version < run.writer.head.version:
        head = ledger.wait_newer(position, time.monotonic() + 60)
        position = Position(head.version, head.sha256)
    ledger.head()
    ledger.head()  # the second download of HEAD is believed
    hub.forget()
    assert ledger.wait_newer(position, time.monotonic() + 2, poll_seconds=0.05) is None  # some 40 looks
    assert sum(hub.counts().values()) == 0, "an idle replica asks nothing between two listings"

    asked: Counter[str] = Counter()
    for _ in range(5):
        run.delta()
        hub.forget()
        head = ledger.wait_newer(position, time.monotonic() + 60)
        position = Position(head.version, head.sha256)
        for ref in head.objects:
            ledger.read_object(ref)
        asked += hub.counts()
    assert asked["resolver"] == 0
    assert asked["api"] <= 1  # a listing, if one was due


def test_what_a_mirror_costs(hub, hub_bucket, uri, replica, tmp_path):
    """The numbers of docs/STORES-HUB.md, of one that follows a bucket into another."""
    run = TinyRun(open_store(uri))
    run.origin()
    target = open_store(f"hf://buckets/{hub.new_bucket(f'{hub_bucket}-copy')}/run")
    mirror = Mirror(replica, target, ObjectCache(tmp_path / "cache"), poll=0.01)
    wait_until(lambda: mirror.copy() and mirror.reached.version == 1)
    for _ in range(3):
        mirror.copy()  # small objects are believed once two downloads agreed
    hub.forget()
    for _ in range(20):
        assert mirror.copy()
    assert sum(hub.counts().values()) == 0, "an idle mirror asks nothing between two listings"
    for _ in range(3):
        run.delta()
        hub.forget()
        wait_until(lambda: mirror.copy() and mirror.reached.version == run.writer.head.version)
        counts = hub.counts()
        assert counts["resolver"] == 3
        assert counts["api"] <= 3 + 1  # a listing, if one was due


def wait_until(what, seconds=20.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_reader_processes_end_bit_equal_with_faults_at_a_tenth_of_all_calls(hub, uri, tmp_path, capsys):
    follow_with_faults(hub, uri, tmp_path, capsys, readers=3, versions=20)


@pytest.mark.long
def test_sixteen_reader_processes_and_fifty_versions(hub, uri, tmp_path, capsys):
    follow_with_faults(hub, uri, tmp_path, capsys, readers=16, versions=50)


def follow_with_faults(hub, uri, tmp_path, capsys, *, readers, versions):
    for kind, more in ALL_FAULTS:
        hub.faults.add(kind, "", rate=0.1 / len(ALL_FAULTS), **more)
    hub.faults.add("stale", "/tree", seconds=3, rate=0.1)
    logs = [tmp_path / f"{number}.json" for number in range(readers)]
    processes = [
        subprocess.Popen([sys.executable, str(READER), uri, str(versions), str(log)], stderr=subprocess.PIPE, text=True)
        for log in logs
    ]
    try:
        expected, again = publish(uri, versions, tmp_path)
        for process in processes:
            _, errors = process.communicate(timeout=300)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in processes:
            process.kill()
            process.wait(10)
            process.stderr.close()
    for log in logs:
        read = json.loads(log.read_text())
        again += Counter(read["again"])
        followed = read["followed"]
        assert [version for version, _ in followed] == sorted({version for version, _ in followed})
        assert followed[-1][0] == versions
        assert all(expected[version] == digest for version, digest in followed)
    met = dict(hub.faults.met)
    title = f"{readers} readers, {versions} versions, {len(hub.asked)} requests to the Hub"
    with capsys.disabled():
        print(fault_table(title, met, again))
    assert set(met) >= {"status 500", "status 503", "status 429", "drop", "drop after", "delay", "flip"}


def publish(uri, versions, tmp_path):
    """Commit that many versions, again where the store failed: each version's state digest, and the errors."""
    again: Counter[str] = Counter()

    def until_it_works(call):
        for _ in range(20):
            try:
                return call()
            except StoreError as error:
                again[f"{type(error).__name__} ({error.action})"] += 1
        raise AssertionError(f"20 failures in a row: {again}")

    run = until_it_works(lambda: TinyRun(open_store(uri)))
    digests = {}
    for version in range(1, versions + 1):
        manifest = until_it_works(run.origin if version == 1 else lambda: again_delta(run))
        digests[manifest.version] = state_digest(states(run.now))
        if version == 1:
            until_it_works(lambda: run.anchor(tmp_path / "anchor"))
    assert sorted(digests) == list(range(1, versions + 1))
    return digests, again


def again_delta(run):
    """The same delta as the attempt before, as a publisher does."""
    number = run.number
    try:
        return run.delta()
    except StoreError:
        run.number = number
        raise


def test_of_two_trainers_one_stops_before_it_publishes_anything(hub, uri):
    """The Hub cannot refuse the second claim; whoever finds another's claim under its epoch stops, and says why."""
    first = TinyRun(open_store(uri), writer="first")
    claim = open_store(uri)
    theirs = first.writer.claim
    claim.put(theirs.key, type(theirs)(theirs.run, theirs.epoch, "second", theirs.created_at).to_bytes())
    with pytest.raises(ConflictError, match="second publisher"):
        first.origin()
    assert list(claim.list("manifests/")) == []


@pytest.mark.parametrize("seed", range(4))
def test_two_trainers_started_together_never_make_a_fork_that_is_served(hub, hub_bucket, tmp_path, seed):
    """Their requests cross in every way; at most one goes on, and what it committed is the run from its origin on.

    The origin may follow a version that the other one published before it was stopped, of another run's name even:
    then it needs an anchor, which a publisher attaches where no replica has an origin's state.
    """
    uri = f"hf://buckets/{hub_bucket}/{seed}"
    hub.faults.add("delay", "batch", rate=0.5, seconds=0.2)
    runs: list[TinyRun] = []
    stopped: list[ConflictError] = []
    together = threading.Barrier(2)

    def train(name):
        together.wait(60)
        try:
            run = TinyRun(open_store(uri), writer=name)
            run.origin()
            for _ in range(4):
                run.delta()
            runs.append(run)
        except ConflictError as error:
            stopped.append(error)

    threads = [threading.Thread(target=train, args=(name,), daemon=True) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads)
    assert len(runs) + len(stopped) == 2
    assert stopped, "both went on"
    assert all("publisher" in str(error) for error in stopped)
    ledger = Ledger(open_store(uri))
    for run in runs:
        head = ledger.head()
        chain = [head, *ledger.ancestors(head, head.version - 4)]
        assert [manifest.kind for manifest in chain] == ["delta"] * 4 + ["origin"]
        assert [manifest.sha256 for manifest in chain] == list(run.bits)[::-1], "a committed version was lost"
        run.anchor(tmp_path / "anchor", chain[-1])
        run.check(ledger.plan(None, None), None)


def test_the_next_trainer_continues_what_the_last_one_published(hub, uri, replica):
    """A writer asks the Hub itself, whatever a feed has said."""
    run = TinyRun(open_store(uri))
    run.origin()
    last = run.delta()
    following = Writer.open(Ledger(open_store(uri)))
    assert following.previous.sha256 == last.sha256
    with pytest.raises(ConflictError, match="second publisher"):
        run.delta()
