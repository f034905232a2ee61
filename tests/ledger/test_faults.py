"""The store may fail, and the trainer may die, at every call: nothing committed is lost, nothing is half there."""

from __future__ import annotations

import uuid

import pytest
from faulty_store import FAULTS, Died, FaultyStore
from tiny_run import BF16, SHAPES, changed, commit_delta, commit_origin, first_bits, follow, states

from delta_sync import StoreError, state_digest
from delta_sync.anchor_files import write_anchor_files
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.store import MemoryStore
from delta_sync.writer import Writer

TRIES = 5


class Trainer:
    """Publishes like a real one: tries again on StoreError; when it dies, a new one resumes with an origin."""

    def __init__(self, store: FaultyStore, folder) -> None:
        self.store, self.folder = store, folder
        self.committed = []  # what commit() returned, and so promised
        self.bits = {}  # by state digest: what each version must give
        self.now = first_bits()
        self.number = 0
        self.writer = None

    def run(self, act):
        """Do ``act`` until it is done; dying means that a new trainer takes over, which then does it."""
        for _ in range(TRIES):
            try:
                return act()
            except StoreError:
                continue
            except Died:
                self.writer = None
                self.resume()
        raise AssertionError("one fault must not need so many attempts")

    def resume(self):
        self.writer = Writer.open(Ledger(self.store))
        self._note(self.now)
        self.committed.append(commit_origin(self.writer, self.now))
        self.anchor()

    def anchor(self):
        # written once: identical bytes, so a second attempt heals what a first one left
        tensors = [(name, BF16, SHAPES[name], self.now[name]) for name in self.now]
        files = write_anchor_files(self.folder / uuid.uuid4().hex, tensors)
        self.writer.attach_anchor(self.writer.head, {**files, "config.json": b"{}"}, states(self.now))

    def step(self):
        self.number += 1
        after = changed(self.now, self.number)
        self._note(after)
        result = self.run(lambda: self._commit(after))
        self.committed.append(result)

    def _commit(self, after):
        manifest = commit_delta(self.writer, self.now, after, self.number)
        self.now = after
        return manifest

    def _note(self, bits):
        self.bits[state_digest(states(bits))] = bits


class Replica:
    """Follows the run like a real one, never going back, and proves every version that it takes."""

    def __init__(self, store, trainer: Trainer) -> None:
        self.ledger, self.trainer = Ledger(store), trainer
        self.position, self.bits, self.order = None, None, (0, 0)

    def follow(self):
        live = state_digest(states(self.bits)) if self.bits else None
        plan = self.ledger.plan(self.position, live)
        if plan is None:
            return
        assert (plan.target.epoch, plan.target.version) > self.order
        self.bits = follow(self.ledger, plan, self.bits)
        expected = self.trainer.bits[plan.target.state_digest]
        assert all((self.bits[name] == expected[name]).all() for name in expected)
        self.position, self.order = plan.position, (plan.target.epoch, plan.target.version)


def scenario(store, folder, faulty):
    """A whole life; ``faulty`` wraps what the trainer sees, replicas read the true store."""
    trainer = Trainer(faulty, folder)
    replica = Replica(store, trainer)
    trainer.run(trainer.resume)
    replica.follow()
    for number in range(3):
        trainer.step()
        if number == 1:
            trainer.run(trainer.anchor)
        replica.follow()
    trainer.run(trainer.resume)
    replica.follow()
    trainer.step()
    replica.follow()
    return trainer, replica


def check(store, trainer, replica):
    ledger = Ledger(store)
    head = ledger.head()
    chain = {manifest.sha256 for manifest in [head, *ledger.ancestors(head, 1)]}
    assert len(chain) == head.version
    for manifest in trainer.committed:
        assert manifest.sha256 in chain, f"version {manifest.version} was committed and then lost"
    assert head == trainer.committed[-1]
    assert replica.position == Position(head.version, head.sha256)
    late = Replica(store, trainer)
    late.follow()
    assert all((late.bits[name] == trainer.now[name]).all() for name in late.bits)


@pytest.fixture(scope="module")
def calls(tmp_path_factory):
    store = MemoryStore(uuid.uuid4().hex)
    faulty = FaultyStore(store)
    trainer, replica = scenario(store, tmp_path_factory.mktemp("dry"), faulty)
    check(store, trainer, replica)
    store.clear()
    return faulty.names


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_at_every_call(calls, fault, tmp_path):
    assert len(calls) > 40
    for number, name in enumerate(calls):
        store = MemoryStore(uuid.uuid4().hex)
        faulty = FaultyStore(store)
        faulty.arm(number, fault)
        trainer, replica = scenario(store, tmp_path / str(number), faulty)
        assert faulty.fault is None, f"call {number} ({name}) never came"
        check(store, trainer, replica)
        store.clear()
