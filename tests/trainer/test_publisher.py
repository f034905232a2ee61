"""The publishing thread over a memory store: coalescing, failure, ambiguity, healing, anchors; always bit-exact."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise

import bucket
import pytest
import tiny

from delta_sync.ack import Ack
from delta_sync.claims import claim_reset
from delta_sync.errors import ConflictError, StoreError, SyncTimeoutError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.store.base import Store
from delta_sync.store.memory import MemoryStore
from delta_sync.store.open import open_store
from delta_sync.writer import Writer
from trl_callback.chain import Chain
from trl_callback.config import DeltaSyncConfig
from trl_callback.healing import Refusal
from trl_callback.metrics import Metrics
from trl_callback.publisher import Publisher
from trl_callback.serving_image import ServingImage
from trl_callback.session import Session, Subject
from trl_callback.snapshot import Snapshot


class Faulty(MemoryStore):
    """A memory store whose next writes can be made to fail, before or after they happened, or to wait."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.faults: list[tuple[str, bool]] = []  # (part of a key, whether the write happens all the same)
        self.gate = threading.Event()
        self.gate.set()

    def put(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, lambda: super(Faulty, self).put(key, data))

    def create(self, key: str, data: bytes | memoryview) -> None:
        self._write(key, lambda: super(Faulty, self).create(key, data))

    def _write(self, key: str, write: Callable[[], None]) -> None:
        if key.startswith("deltas/"):
            assert self.gate.wait(120)
        fault = self.faults[0] if self.faults and self.faults[0][0] in key else None
        if fault is None:
            return write()
        self.faults.pop(0)
        if fault[1]:
            write()
        raise StoreError(key, expected="a write", got="an injected fault")


class Run:
    """A model, its snapshot and its publisher over one faulty memory store."""

    def __init__(self, **settings: object) -> None:
        self.name = uuid.uuid4().hex
        self.uri = f"memory://{self.name}"
        self.store = Faulty(self.name)
        self.model = tiny.llama()
        self.image = ServingImage(self.model, lambda name: "BF16")
        self.config = DeltaSyncConfig.build(self.uri, **{"publish_timeout": 120.0, "refusal_grace": 0.5, **settings})
        self.snapshot = Snapshot(self.image)
        self.metrics = Metrics()
        self.chain = Chain(Ledger(self.store), self.snapshot, self.config, {"config.json": b"{}"}, 0)
        self.publisher = Publisher(self.chain, self.snapshot, self.config, self.metrics)
        self.publisher.want_anchor(urgent=True)
        self.step = 0

    def train(self, *, publish: bool = True, scale: float = 1e-3) -> None:
        self.step += 1
        tiny.nudge(self.model, seed=self.step, scale=scale)
        if publish:
            self.publisher.capture(self.image, self.step)

    def check(self) -> None:
        self.publisher.flush(120)
        assert bucket.materialise(self.uri) == bucket.cast_bytes(tiny.cast_state(self.model))
        assert {n: b.tobytes() for n, _, _, b in self.snapshot} == bucket.cast_bytes(tiny.cast_state(self.model))


@contextmanager
def running(**settings: object) -> Iterator[Run]:
    run = Run(**settings)
    run.publisher.start()
    try:
        yield run
    finally:
        run.store.gate.set()
        run.publisher.stop()


def test_every_step_is_a_version_with_the_models_bits() -> None:
    with running() as run:
        for _ in range(4):
            run.train()
            run.check()
        kinds = [(m.version, m.kind, m.steps) for m in bucket.chain(run.uri)]
    assert kinds == [(1, "origin", (0, 0)), *((v, "delta", (v - 1, v - 1)) for v in range(2, 6))]


def test_a_step_without_changes_is_an_empty_version() -> None:
    with running() as run:
        run.publisher.capture(run.image, 1)
        run.publisher.flush(120)
        assert [(m.version, m.changed_elements) for m in bucket.chain(run.uri)] == [(1, 0), (2, 0)]
        covering = run.publisher.covering(1)
        assert covering is not None and covering.version == 2
        run.check()


def test_steps_that_pile_up_behind_a_slow_store_become_one_version() -> None:
    with running() as run:
        run.store.gate.clear()
        for _ in range(6):
            run.train()
        run.store.gate.set()
        run.check()
        steps = [m.steps for m in bucket.chain(run.uri)]
    assert steps[0] == (0, 0) and steps[-1][1] == 6 and len(steps) <= 4
    assert all(after[0] == before[1] + 1 for before, after in pairwise(steps))


def test_changes_that_go_back_while_they_are_published_end_exactly_where_the_model_is() -> None:
    """step 1 is in flight while step 2 undoes it: the waiting changes were none, and must become step 1's inverse."""
    with running() as run:
        before = {name: t.clone() for name, t in run.model.state_dict().items()}
        run.publisher.flush(120)
        run.store.gate.clear()
        run.train(scale=0.05)
        time.sleep(0.1)
        run.model.load_state_dict(before)
        run.step += 1
        assert run.publisher.capture(run.image, run.step).deltas == {}
        run.store.gate.set()
        run.check()
        first, second = (m.changed_elements for m in bucket.chain(run.uri)[1:])
    assert first == second > 0


def test_what_is_in_flight_is_not_published_twice() -> None:
    """The end of training captures the last step again while it is still on its way."""
    with running() as run:
        run.store.gate.clear()
        run.train()
        time.sleep(0.1)
        assert run.publisher.capture(run.image, run.step, even_if_same=False).deltas
        run.store.gate.set()
        run.check()
        assert [m.steps for m in bucket.chain(run.uri)] == [(0, 0), (1, 1)]


@pytest.mark.parametrize("happened", [False, True])
@pytest.mark.parametrize("key", ["deltas/", "manifests/", "HEAD"])
def test_a_failed_or_ambiguous_write_loses_nothing_and_doubles_nothing(key: str, happened: bool) -> None:
    with running() as run:
        run.train()
        run.check()
        run.store.faults += [(key, happened)]
        run.train()
        run.train()
        run.check()
        run.train()
        run.check()
        versions = [m.version for m in bucket.chain(run.uri)]
    assert run.store.faults == [] and versions == list(range(1, len(versions) + 1))


def test_a_step_that_was_never_captured_is_covered_by_the_next_one() -> None:
    with running() as run:
        run.train()
        run.train(publish=False)
        run.train()
        run.check()
        assert bucket.newest(run.uri).steps[1] == 3


def test_a_store_that_stays_down_stops_training_at_the_next_hook() -> None:
    with running(publish_timeout=0.6) as run:
        run.publisher.flush(120)
        run.store.faults += [("deltas/", False)] * 100
        run.train()
        with pytest.raises(StoreError, match="injected"):
            deadline = time.monotonic() + 20
            while time.monotonic() < deadline:
                run.publisher.raise_if_failed()
                time.sleep(0.02)
        with pytest.raises(StoreError, match="injected"):
            run.train()
        with pytest.raises(StoreError, match="injected"):
            run.publisher.flush(1)


def test_a_flush_has_a_deadline_and_says_why() -> None:
    with running() as run:
        run.publisher.flush(120)
        run.store.faults += [("deltas/", False)] * 3
        run.train()
        settle(lambda: run.publisher.last_error is not None)
        run.store.gate.clear()
        with pytest.raises(SyncTimeoutError, match=r"step 1.*injected.*flush_timeout"):
            run.publisher.flush(0.3)


def test_a_second_trainer_stops_the_first_and_continues_its_versions() -> None:
    with running() as run:
        run.train()
        run.check()
        Writer.open(Ledger(open_store(run.uri)))
        run.train()
        with pytest.raises(ConflictError, match="second publisher"):
            run.publisher.flush(120)


@pytest.mark.parametrize("at_work", [False, True])
def test_after_a_reset_a_trainer_at_work_begins_a_chain(at_work: bool) -> None:
    with running() as run:
        run.train()
        run.check()
        if at_work:  # the reset comes between two fences of one commit
            run.store.gate.clear()
            run.train()
            time.sleep(0.2)
        claim_reset(Ledger(open_store(run.uri)))
        run.store.gate.set()
        run.train()
        run.check()
        versions = bucket.chain(run.uri)
        origin = next(m for m in versions if m.epoch == 3)
        assert origin.kind == "origin" and versions[-1].epoch == 3
        assert AnchorRef(origin.version, 3) in Ledger(open_store(run.uri)).anchors()
        run.train()
        run.check()
        newest = bucket.newest(run.uri)
        assert run.publisher.by_version(newest.version) == run.publisher.covering(run.step)
        assert [m.version for m in bucket.chain(run.uri)] == list(range(1, newest.version + 1))


def test_an_origin_after_a_reset_whose_answer_was_lost_is_not_forked(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    claim_reset(Ledger(open_store(run.uri)))
    run.store.faults = [("manifests/", True)]
    with monkeypatch.context() as store_away:
        get = run.store.get

        def away(key: str, **limits: int) -> bytes:
            if not run.store.faults and "manifests/" in key:
                raise StoreError(key, expected="a read", got="an injected fault")
            return get(key, **limits)

        store_away.setattr(run.store, "get", away)
        with pytest.raises(StoreError):
            run.chain.begin_again()
    run.chain.begin_again()
    listed = Ledger(open_store(run.uri))
    assert [(m.version, m.epoch) for m in bucket.chain(run.uri)] == [(1, 1), (2, 3), (3, 4)]
    assert listed.head().version == run.chain.newest.version == 3


def test_the_snapshot_stays_where_the_bucket_is_until_a_commit_is_durable() -> None:
    with running() as run:
        run.publisher.flush(120)
        before = {n: b.tobytes() for n, _, _, b in run.snapshot}
        run.store.gate.clear()
        run.train(scale=0.1)
        time.sleep(0.2)
        assert {n: b.tobytes() for n, _, _, b in run.snapshot} == before
        run.store.gate.set()
        run.check()


def test_anchors_come_every_so_many_versions() -> None:
    with running(anchor_every=3) as run:
        for _ in range(8):
            run.train()
            run.publisher.flush(120)
            settle(lambda: not run.publisher.anchor_wanted)
        anchors = [ref.version for ref in Ledger(open_store(run.uri)).anchors()]
        run.check()
    assert anchors == [1, 4, 7]


def test_an_anchor_nobody_waits_for_may_fail_without_holding_up_a_version(monkeypatch) -> None:
    with running(anchor_every=1, publish_timeout=0.5) as run:
        run.publisher.flush(120)
        settle(lambda: not run.publisher.anchor_wanted)
        run.store.faults += [("anchors/", False)]
        for _ in range(3):
            run.train()
            run.publisher.flush(120)
            settle(lambda: not run.publisher.anchor_wanted)
        run.check()
        assert run.store.faults == []
        assert [ref.version for ref in Ledger(open_store(run.uri)).anchors()] == [1, 3, 4]


def test_a_full_temporary_disk_is_named(monkeypatch) -> None:
    def full(path: object, tensors: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trl_callback.anchor_job.write_shard", full)
    with running(publish_timeout=0.3) as run, pytest.raises(StoreError, match=r"No space left.*TMPDIR"):
        run.train()
        run.publisher.flush(120)


def test_a_refused_version_is_put_again_and_then_answered_with_an_anchor() -> None:
    with running(refusal_grace=60.0) as run:
        run.train()
        run.check()
        version = bucket.newest(run.uri)
        (ref,) = version.objects
        good = run.store.get(ref.key, max_bytes=ref.size)
        run.store.put(ref.key, b"x" * ref.size)
        refuse(run, version.version, attempts=1)
        settle(lambda: run.store.get(ref.key, max_bytes=ref.size) == good)
        refuse(run, version.version, attempts=1)
        time.sleep(0.2)
        assert [a.version for a in Ledger(open_store(run.uri)).anchors()] == [1]
        run.train()
        run.check()
        refuse(run, version.version, attempts=2)
        settle(lambda: [a.version for a in Ledger(open_store(run.uri)).anchors()] == [1, version.version + 1])


def test_a_replica_that_recovered_while_another_was_healed_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as run:
        run.train()
        run.check()
        version = bucket.newest(run.uri).version
        put_again = []

        def republish(version: int) -> None:
            put_again.append(version)
            run.publisher.report({"two": None})

        monkeypatch.setattr(run.chain, "republish", republish)
        run.publisher.report({name: Refusal(name, version, "IntegrityError", "sha256") for name in ("one", "two")})
        settle(lambda: not run.publisher._refusals)
        run.train()
        run.check()
        assert put_again == [version]


def refuse(run: Run, version: int, *, attempts: int) -> None:
    run.publisher.report({"one": Refusal("one", version, "IntegrityError", "sha256", attempts=attempts)})


def settle(done: Callable[[], bool], timeout: float = 120) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)


def test_the_store_contract_of_the_stand_in_is_the_real_one() -> None:
    assert isinstance(Faulty(uuid.uuid4().hex), Store)


def test_a_store_call_that_does_not_return_stops_training_at_the_next_hook() -> None:
    with running(publish_timeout=0.5) as run:
        run.publisher.flush(120)
        run.store.gate.clear()
        run.train()
        deadline = time.monotonic() + 10
        with pytest.raises(StoreError, match="has not returned"):
            while time.monotonic() < deadline:
                run.train()
                time.sleep(0.05)


def test_opening_a_store_that_does_not_answer_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    gate = threading.Event()
    monkeypatch.setattr(Writer, "open", lambda *args, **kwargs: gate.wait(20))
    config = DeltaSyncConfig.build(f"memory://{uuid.uuid4().hex}", publish_timeout=0.5)
    with pytest.raises(StoreError, match="opening memory://"):
        Session(Subject(tiny.llama(), None, "BF16", 0), config, None, Metrics())
    gate.set()


def test_an_acknowledgement_older_than_the_run_is_not_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trl_callback.publisher.LOOK", 0.05)
    run = Run(anchor_every=0, refusal_grace=0.1)
    dead = Ack("dead", None, None, None, "refused", 1, None, "ChainError", "long ago", time.time() - 1e6)
    Ledger(run.store).acknowledge(dead)
    run.publisher = Publisher(run.chain, run.snapshot, run.config, run.metrics)
    run.publisher.start()
    try:
        run.train()
        run.publisher.flush(120)
        time.sleep(0.5)
        assert Ledger(run.store).anchors() == []
        Ledger(run.store).acknowledge(replace(dead, time=time.time(), refused_version=2))
        deadline = time.monotonic() + 10
        while not Ledger(run.store).anchors():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    finally:
        run.publisher.stop()


def test_a_periodic_anchor_that_never_fits_never_stops_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with running(anchor_every=2, publish_timeout=0.5) as run:
        run.publisher.flush(120)
        tried = []

        def fails(*, newest: bool) -> None:
            tried.append(run.chain.newest.version)
            raise StoreError("an anchor", expected="room", got="none")

        monkeypatch.setattr(run.chain, "advance_anchor", fails)
        for _ in range(12):
            run.train()
            run.publisher.flush(120)
            time.sleep(0.08)
        assert run.chain.newest.version == 13
        assert 2 <= len(tried) <= 7
        assert all(after - before >= 2 for before, after in pairwise(tried))


def test_who_continues_a_used_uri_is_told(caplog) -> None:
    uri = f"memory://{uuid.uuid4().hex}"

    def train_once() -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            session = Session(Subject(tiny.llama(), None, "BF16", 0), DeltaSyncConfig(uri), None, Metrics())
            session.close()
        return caplog.text

    assert "already has" not in train_once()
    assert "already has version 1 (epoch 1): this trainer goes on after it as epoch 2" in train_once()
