"""sync_weights always comes to an end: it publishes what it waits for, heals what is refused, or says what is wrong."""

from __future__ import annotations

import hashlib
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import bucket
import pytest
import tiny
from stand_in_replica import StandInReplica

from delta_sync.delta_file import decode_delta, encode_delta
from delta_sync.errors import ConflictError, MappingError, StoreError, SyncTimeoutError
from delta_sync.ledger import Ledger
from delta_sync.manifest import ObjectRef
from delta_sync.store.keys import delta_key
from delta_sync.store.open import open_store
from trl_callback.config import DeltaSyncConfig
from trl_callback.http import Server
from trl_callback.metrics import Metrics
from trl_callback.session import Session, Subject
from trl_callback.status_client import StatusClient


class Loop:
    """What a trainer does, by hand: step, publish or not, wait."""

    def __init__(self, uri: str, replica: StandInReplica, model: Any, **settings: Any) -> None:
        self.model, self.replica, self.step = model, replica, 0
        self.config = DeltaSyncConfig.build(uri, **{"sync_timeout": 120.0, "refusal_grace": 1.0, **settings})
        self.metrics = Metrics()
        status = StatusClient(Server(replica.url), timeout=2)
        self.session = Session(Subject(model, None, "BF16", 0), self.config, status, self.metrics)

    def train(self, steps: int = 1, *, scale: float = 1e-3) -> None:
        for _ in range(steps):
            self.step += 1
            tiny.nudge(self.model, seed=self.step, scale=scale)
            self.session.step_done(self.step)

    def sync(self) -> None:
        self.session.sync(self.step)

    def check(self) -> None:
        """The replica serves exactly the model."""
        served = {name: bits.tobytes() for name, bits in self.replica.live.items()}
        assert served == bucket.cast_bytes(tiny.cast_state(self.model))


@contextmanager
def looping(*, same: bool = True, replica: dict[str, Any] | None = None, **settings: Any) -> Iterator[Loop]:
    uri = f"memory://{uuid.uuid4().hex}"
    model = tiny.llama()
    with StandInReplica(uri, model if same else tiny.llama(seed=9), **(replica or {})).running() as running:
        loop = Loop(uri, running, model, **settings)
        try:
            yield loop
        finally:
            loop.session.close()


def test_on_policy_means_this_steps_weights() -> None:
    with looping() as loop:
        loop.sync()
        for _ in range(3):
            loop.train()
            loop.sync()
            loop.check()
        assert loop.replica.served == [1, 2, 3, 4]
        assert loop.metrics.take()["delta_sync/staleness"] == 0


def test_waiting_publishes_a_step_that_nobody_captured() -> None:
    with looping(publish_every=100) as loop:
        loop.train(3)
        loop.sync()
        loop.check()
        assert bucket.newest(loop.config.uri).steps == (1, 3)


def test_weights_changed_without_a_published_step_are_an_empty_or_full_version_not_a_deadlock() -> None:
    with looping() as loop:
        loop.session.step_done(1)  # an optimizer step that changed nothing
        loop.session.sync(1)
        assert bucket.newest(loop.config.uri).changed_elements == 0
        loop.session.sync(5)  # steps that no event told us about
        assert bucket.newest(loop.config.uri).steps == (2, 5)


def test_max_staleness_lets_rollouts_run_ahead_of_the_server() -> None:
    with looping(max_staleness=2, sync_timeout=0.5) as loop:
        loop.sync()
        loop.replica.paused.set()
        loop.train(2)
        loop.sync()
        assert loop.metrics.take()["delta_sync/staleness"] == pytest.approx(1.0)  # mean of 0 and 2
        loop.train()
        with pytest.raises(SyncTimeoutError):
            loop.sync()
        loop.replica.paused.clear()
        settle(lambda: loop.replica.served[-1] >= 2)
        loop.sync()


def damage(loop: Loop, how: Callable[[bytes], bytes]) -> None:
    """Hold the replica, publish a step, change its object in the bucket, let the replica go."""
    loop.replica.paused.set()
    loop.train()
    loop.session._publisher.flush(120)
    store = open_store(loop.config.uri)
    (ref,) = bucket.newest(loop.config.uri).objects
    store.put(ref.key, how(store.get(ref.key, max_bytes=ref.size)))
    loop.replica.paused.clear()


def flipped(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


@pytest.mark.parametrize("has_route", [True, False])
def test_a_damaged_object_is_healed_at_once(has_route: bool) -> None:
    """Also where only the bucket tells of the refusal."""
    with looping(replica={"acknowledges": True}) as loop:
        loop.sync()
        if not has_route:
            loop.replica.hide_status()
        damage(loop, flipped)
        start = time.monotonic()
        loop.sync()
        loop.check()
        assert time.monotonic() - start < 10
        assert loop.replica.refusals >= 1 and loop.replica.anchors_taken == 0
        assert loop.metrics.take()["delta_sync/heals"] == 1


def test_a_store_that_fails_while_only_it_tells_of_replicas_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with looping(replica={"acknowledges": True}) as loop:
        loop.sync()
        loop.replica.hide_status()
        acknowledgements, failed = Ledger.acknowledgements, threading.Event()

        def fail_once(ledger: Ledger) -> Any:
            if threading.current_thread() is threading.main_thread() and not failed.is_set():
                failed.set()
                raise StoreError("listing replicas/", expected="an answer", got="HTTP 503")
            return acknowledgements(ledger)

        monkeypatch.setattr(Ledger, "acknowledgements", fail_once)
        loop.train()
        loop.sync()
        loop.check()
        assert failed.is_set()


def test_a_server_held_at_an_older_version_ends_the_wait_at_once() -> None:
    with looping() as loop:
        loop.sync()
        loop.replica.paused.set()
        loop.replica.pinned = loop.replica.position.version
        loop.train()
        start = time.monotonic()
        with pytest.raises(ConflictError, match=r"holds at version 1.*unpin"):
            loop.sync()
        assert time.monotonic() - start < 10
        loop.replica.pinned = None
        loop.replica.paused.clear()
        loop.sync()
        loop.check()


def test_a_lost_object_is_healed_at_once() -> None:
    with looping() as loop:
        loop.sync()
        loop.replica.paused.set()
        loop.train()
        loop.session._publisher.flush(120)
        (ref,) = bucket.newest(loop.config.uri).objects
        open_store(loop.config.uri).delete(ref.key)
        loop.replica.paused.clear()
        loop.sync()
        loop.check()


def test_a_version_that_stays_refused_is_answered_with_complete_weights() -> None:
    """The object is what the manifest promises, but its content is wrong: putting it again can't help."""
    with looping() as loop:
        loop.sync()
        publisher = loop.session._publisher
        original = publisher._chain.prepare

        def wrong(changes: Any) -> Any:
            """An encoder gone wrong: the digests are right, one changed value is not."""
            attempt = original(changes)
            [data] = attempt.kept
            header, deltas = decode_delta(data)
            deltas[0].values[0] += 1
            data = encode_delta(header, deltas)
            sha256 = hashlib.sha256(data).hexdigest()
            ref = ObjectRef(delta_key(header.version, loop.session._publisher._chain.epoch, sha256), len(data), sha256)
            open_store(loop.config.uri).put(ref.key, data)
            return replace(attempt, objects=(ref,), kept=(data,))

        publisher._chain.prepare = wrong
        loop.train()
        publisher.flush(120)
        publisher._chain.prepare = original
        loop.sync()
        loop.check()
        assert loop.replica.anchors_taken == 1 and loop.replica.refusals >= 1
        loop.train()
        loop.sync()
        loop.check()


def test_a_server_that_restarts_far_behind_gets_complete_weights() -> None:
    """It starts from a checkpoint that is on nobody's chain."""
    with looping(same=False) as loop:
        loop.sync()
        loop.train(2)
        loop.sync()
        store = open_store(loop.config.uri)
        for anchor in Ledger(store).anchors():
            for info in list(store.list(f"anchors/{anchor.version:012d}-")):
                store.delete(info.key)
        loop.replica.restart(tiny.llama(seed=17))
        loop.sync()
        loop.check()


def test_a_dead_server_is_named_at_the_deadline() -> None:
    with ExitStack() as stack:
        loop = stack.enter_context(looping(sync_timeout=1.0))
        loop.sync()
        url = loop.replica.url
        loop.replica.stop_serving()
        loop.train()
        start = time.monotonic()
        with pytest.raises(SyncTimeoutError) as caught:
            loop.sync()
        assert time.monotonic() - start < 8
        said = str(caught.value)
        assert url in said and "version 2" in said and "step 1" in said and "connection refused" in said
        assert "--delta-sync" in said and "sync_timeout" in said


def test_a_server_that_never_catches_up_is_described() -> None:
    with looping(sync_timeout=0.6) as loop:
        loop.sync()
        loop.replica.paused.set()
        loop.train()
        with pytest.raises(SyncTimeoutError, match=r"version 2 \(step 1\).*version 1"):
            loop.sync()


def test_another_trainers_newer_version_is_a_conflict() -> None:
    with looping() as loop:
        loop.sync()
        other = Loop(loop.config.uri, loop.replica, tiny.llama(seed=4))
        other.sync()
        with pytest.raises(ConflictError, match="another trainer"):
            loop.session._wait.until(0)
        other.session.close()


def test_a_model_the_server_cannot_update_ends_the_wait_at_once() -> None:
    with looping() as loop:
        loop.sync()
        loop.replica.paused.set()
        loop.replica.refusal = {
            "version": 2,
            "manifest": None,
            "kind": "MappingError",
            "error": "tensor 'w' is quantised",
        }
        loop.train()
        with pytest.raises(MappingError, match="tensor 'w' is quantised"):
            loop.sync()
        assert loop.replica.anchors_taken == 0


def test_the_publishers_error_ends_the_wait() -> None:
    with looping() as loop:
        loop.sync()
        other = Loop(loop.config.uri, loop.replica, loop.model)
        with pytest.raises(ConflictError):
            loop.train()
            loop.sync()
        other.session.close()


def test_the_servers_digest_is_waited_for_at_the_start() -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    with StandInReplica(uri, tiny.llama()).running() as replica:
        known, replica.state_digest = replica.state_digest, None
        timer = threading.Timer(0.6, lambda: setattr(replica, "state_digest", known))
        timer.start()
        loop = Loop(uri, replica, tiny.llama())
        loop.sync()
        assert replica.anchors_taken == 0
        loop.session.close()
        replica.state_digest = None
        with pytest.raises(SyncTimeoutError, match=r"a digest of its live weights within 0.3 s"):
            Loop(uri, replica, tiny.llama(), sync_timeout=0.3)


def settle(done: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not done():
        assert time.monotonic() < deadline, "did not come about in time"
        time.sleep(0.02)
