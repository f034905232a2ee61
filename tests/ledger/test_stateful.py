"""Trainers die, restart and overlap, stores fail, HEAD lies, replicas come late, old versions go, deltas are folded:
hypothesis looks for a bad order.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
from faulty_store import FAULTS, Died, FaultyStore
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tiny_run import attach, changed, commit_delta, commit_origin, first_bits, follow, states

from delta_sync import ChainError, ConflictError, StoreError, decode_delta, ledger, state_digest, writer
from delta_sync.delta import fold
from delta_sync.errors import NotFoundError
from delta_sync.fold_writer import attach_fold
from delta_sync.ledger import Ledger
from delta_sync.records import Head
from delta_sync.retention import delete, find_trim
from delta_sync.store import MemoryStore, Store
from delta_sync.store.keys import HEAD
from delta_sync.writer import Writer

CALLS = st.integers(0, 12)
HOUR = 3600.0


@pytest.fixture(autouse=True)
def one_after_the_other(monkeypatch):
    """The calls that are made at once; a fault comes at a call by its number, which would else be another's."""
    for module in (ledger, writer):
        monkeypatch.setattr(module, "aside", made_at_once)


def made_at_once(call: Callable[[], object]) -> Future[object]:
    future: Future[object] = Future()
    try:
        future.set_result(call())
    except BaseException as error:  # noqa: BLE001  as the real one
        future.set_exception(error)
    return future


def open_ledger(store: Store) -> Ledger:
    """One that lists no more often on a slow machine: hypothesis wants the same calls whenever it tries an order."""
    return Ledger(store, relist_seconds=HOUR)


class Publisher:
    """One trainer process."""

    def __init__(self, store: FaultyStore) -> None:
        self.store = store
        self.writer = Writer.open(open_ledger(self.store))
        self.now = None  # the bits of its newest version


class Replica:
    def __init__(self, store: MemoryStore) -> None:
        self.ledger = open_ledger(store)
        self.position, self.bits, self.order = None, None, (0, 0)


class Run(RuleBasedStateMachine):
    @initialize()
    def start(self):
        self.folder = tempfile.TemporaryDirectory()
        self.store = MemoryStore(uuid.uuid4().hex)
        self.bits = {}  # by state digest: what each version must give
        self.promised = []  # what a commit returned
        self.number = 0
        self.fenced = []
        self.first_kept = 1
        self.publisher = Publisher(FaultyStore(self.store))
        self.replicas = [Replica(self.store) for _ in range(2)]
        self.late_heads = Ledger(self.store, relist_seconds=0)
        self.order = (0, 0)
        self.publish_origin(first_bits())

    def teardown(self):
        self.store.clear()
        self.folder.cleanup()

    def next_bits(self, bits):
        self.number += 1
        after = changed(bits, self.number)
        self.bits[state_digest(states(after))] = after
        return after

    def publish_origin(self, bits):
        self.bits[state_digest(states(bits))] = bits
        self.promised.append(commit_origin(self.publisher.writer, bits))
        self.publisher.now = bits

    def publish_delta(self, publisher, after):
        self.promised.append(commit_delta(publisher.writer, publisher.now, after, self.number))
        publisher.now = after

    def anchor(self):
        folder = Path(self.folder.name) / uuid.uuid4().hex
        attach(self.publisher.writer, self.publisher.writer.head, self.publisher.now, folder)

    def restart(self):
        """The publisher's process ends; another one starts from weights of its own."""
        self.publisher = Publisher(FaultyStore(self.store))

    def needs_origin(self):
        return self.publisher.now is None

    @precondition(lambda self: not self.needs_origin())
    @rule()
    def step(self):
        self.publish_delta(self.publisher, self.next_bits(self.publisher.now))

    @precondition(lambda self: not self.needs_origin())
    @rule(call=CALLS, fault=st.sampled_from(FAULTS), again=st.booleans())
    def step_with_a_fault(self, call, fault, again):
        """``again``: the trainer tries the same commit; otherwise it comes back later with newer weights."""
        publisher, after = self.publisher, self.next_bits(self.publisher.now)
        publisher.store.arm(call, fault)
        try:
            self.publish_delta(publisher, after)
        except StoreError:
            publisher.store.disarm()
            if again:
                self.publish_delta(publisher, after)
        except Died:
            self.restart()
        publisher.store.disarm()

    @precondition(lambda self: not self.needs_origin())
    @rule(call=CALLS)
    def step_while_another_claims(self, call):
        """A second trainer is started while the first is somewhere in a commit."""
        first, after = self.publisher, self.next_bits(self.publisher.now)
        first.store.arm(call, self.restart)
        try:
            self.publish_delta(first, after)
        except ConflictError:
            assert self.publisher is not first
        if self.publisher is not first:
            self.fenced.append(first)
        first.store.disarm()

    @precondition(lambda self: not self.needs_origin())
    @rule(call=st.integers(0, 6))
    def another_starts_while_the_first_commits(self, call):
        first, after, store = self.publisher, self.next_bits(self.publisher.now), FaultyStore(self.store)
        outcome = []

        def commit():
            try:
                self.publish_delta(first, after)
                outcome.append("committed")
            except ConflictError:
                outcome.append("fenced")

        store.arm(call, commit)
        second = Publisher(store)
        if store.fault is not None:
            commit()
            assert outcome == ["fenced"]
        store.disarm()
        self.publisher = second
        self.fenced.append(first)

    @precondition(lambda self: self.needs_origin())
    @rule(same=st.booleans(), with_anchor=st.booleans())
    def resume(self, same, with_anchor):
        previous = self.publisher.writer.previous
        bits = self.bits[previous.state_digest]
        self.publish_origin(bits if same else self.next_bits(bits))
        if with_anchor:
            self.anchor()

    @rule()
    def restart_the_trainer(self):
        if self.publisher.now is not None:
            self.fenced.append(self.publisher)
        self.restart()

    @precondition(lambda self: self.fenced)
    @rule(data=st.data())
    def a_fenced_trainer_tries(self, data):
        before = Ledger(self.store).head()
        publisher = data.draw(st.sampled_from(self.fenced))
        try:
            self.publish_delta(publisher, self.next_bits(publisher.now))
            raise AssertionError("a fenced writer committed")
        except ConflictError:
            pass
        assert Ledger(self.store).head() == before

    @precondition(lambda self: not self.needs_origin())
    @rule(call=st.integers(0, 8), fault=st.sampled_from([*FAULTS, None]))
    def attach_an_anchor(self, call, fault):
        publisher = self.publisher
        if fault:
            publisher.store.arm(call, fault)
        try:
            self.anchor()
        except StoreError:
            publisher.store.disarm()
            self.anchor()
        except Died:
            self.restart()
        publisher.store.disarm()

    @rule(keep=st.integers(1, 2), call=st.integers(0, 30))
    def old_versions_go(self, keep, call):
        """Perhaps interrupted after so many deletions."""
        trim = find_trim(Ledger(self.store), keep, 10.0, now=time.time() + 20)
        self.first_kept = max(self.first_kept, trim.first_kept or 1)
        faulty = FaultyStore(self.store)
        faulty.arm(call, "die after")
        with contextlib.suppress(Died):
            delete(faulty, trim.keys)

    @rule(data=st.data())
    def fold_some_deltas(self, data):
        chain = self.chain()
        start = data.draw(st.integers(0, max(0, len(chain) - 3)))
        end = start
        while end + 1 < len(chain) and chain[end + 1].kind == "delta" and end - start < 4:
            end += 1
        folded, after = {}, {}
        for manifest in chain[start + 1 : end + 1]:
            for ref in manifest.objects:
                for delta in decode_delta(Ledger(self.store).read_object(ref))[1]:
                    folded[delta.name] = fold([*folded.get(delta.name, ()), delta])
            after |= manifest.tensors
        if end > start:
            attach_fold(self.store, chain[start], chain[end], [d for ds in folded.values() for d in ds], after)

    def chain(self):
        """What is left of the newest version's chain, oldest first."""
        ledger = Ledger(self.store)
        found = [ledger.head()]
        with contextlib.suppress(ChainError):
            while (parent := ledger.parent(found[-1])) is not None:
                found.append(parent)
        return found[::-1]

    @rule(how=st.sampled_from(["gone", "garbage", "old"]), data=st.data())
    def head_lies(self, how, data):
        if how == "gone":
            self.store.delete(HEAD)
        elif how == "garbage":
            self.store.put(HEAD, b"{")
        else:
            old = data.draw(st.sampled_from(self.promised))
            self.store.put(HEAD, Head(old.run, old.epoch, old.writer, old.version, old.sha256).to_bytes())

    @rule(number=st.integers(0, 1), restarted=st.booleans())
    def a_replica_follows(self, number, restarted):
        replica = self.replicas[number]
        if restarted:
            replica.ledger = open_ledger(self.store)
        live = state_digest(states(replica.bits)) if replica.bits else None
        try:
            plan = replica.ledger.plan(replica.position, live)
        except ChainError:
            if self.needs_origin():
                return  # the trainer has just started; it will publish an origin and an anchor
            self.anchor()
            plan = replica.ledger.plan(replica.position, live)
        if plan is None:
            return
        order = (plan.target.epoch, plan.target.version)
        assert order > replica.order
        try:
            replica.bits = follow(replica.ledger, plan, replica.bits)
        except NotFoundError:  # deleted under its eyes: its ledger remembers manifests that are gone
            plan = replica.ledger.plan(replica.position, live, prefer_anchor=True)
            replica.bits = follow(replica.ledger, plan, replica.bits)
        expected = self.bits[plan.target.state_digest]
        assert all((replica.bits[name] == expected[name]).all() for name in expected)
        replica.position, replica.order = plan.position, order

    @invariant()
    def every_promise_is_kept(self):
        chain = self.chain()
        assert chain[0].version <= self.first_kept
        assert [manifest.version for manifest in chain] == list(range(chain[0].version, chain[-1].version + 1))
        left = {manifest.sha256 for manifest in chain}
        assert all(manifest.sha256 in left for manifest in self.promised if manifest.version >= self.first_kept)

    @invariant()
    def a_watcher_never_goes_back(self):
        head = self.late_heads.head()
        assert (head.epoch, head.version) >= self.order
        self.order = (head.epoch, head.version)
        assert head == Ledger(self.store).head()


TestRun = Run.TestCase
TestRun.settings = settings(
    max_examples=120, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True
)
