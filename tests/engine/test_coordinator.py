"""The coordinator over two in-memory ranks: catching up, refusing, healing, rolling back, auditing."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_fakes import KEYS, SHAPES, Executor, Weights
from helpers.publish import Publisher
from typer.testing import CliRunner

from delta_sync.cli.app import app
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.errors import StoreError
from delta_sync.gap_codec import DEFAULT_CODEC, PLANE_CODEC
from delta_sync.ledger import Ledger
from delta_sync.limits import for_model
from delta_sync.retention import delete, find_trim
from delta_sync.signing import load_public_keys
from delta_sync.store.open import open_store
from vllm_delta_plugin.cache_salt import CacheSalt
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.coordinator import Coordinator
from vllm_delta_plugin.engine_core import DeltaSync, EngineFacts
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.main_thread import EngineBroken, MainThread
from vllm_delta_plugin.ranks import RankError, Ranks
from vllm_delta_plugin.status import Facts, Status


class Pause:
    """Notes whether the engine may step."""

    def __init__(self) -> None:
        self.paused = False
        self.times = self.drains = self.recomputed = 0

    def begin(self, drain: bool = False) -> None:
        self.paused = True
        self.times += 1
        self.drains += drain

    def end(self) -> None:
        self.paused = False

    def recompute(self) -> None:
        self.recomputed += 1


class Replica:
    """A coordinator whose turns the test takes itself, with the engine's thread pumped beside it."""

    def __init__(self, uri: str, weights: Weights, acks: str | None = None, **config: Any) -> None:
        self.config = ReplicaConfig(uri, replica="r", retry=0.5, **{"poll": 0.01, "audit_period": 1e9, **config})
        self.stop = threading.Event()
        self.broken: EngineBroken | None = None
        keys = load_public_keys(self.config.public_keys)
        self.ledger = Ledger(open_store(uri), keys=keys, acks=open_store(acks) if acks else None)
        self.executor = Executor(Ledger(open_store(uri)), weights)
        self.salt = CacheSalt()
        self.main = MainThread(self.stop)
        self.pause = Pause()
        live = Live(self.config, Ranks(self.executor.collective_rpc), self.main, self.salt, self.pause)
        self.live = live
        status = Status(Facts("r", uri, "m", "BF16", "processed_logprobs", ""))
        self.coordinator = Coordinator(self.config, self.ledger, live, status, self.stop)
        self._pumping = threading.Thread(target=self._pump, daemon=True)
        self._pumping.start()

    def _pump(self) -> None:
        while not self.stop.is_set():
            try:
                self.main.pump()
            except EngineBroken as error:
                self.broken = error
                return
            time.sleep(0.0005)

    def start(self) -> Replica:
        self.coordinator.start()
        return self

    @property
    def status(self) -> dict[str, Any]:
        return self.coordinator.status.to_dict()

    def wait(self, what: str, condition: Callable[[dict[str, Any]], Any], timeout: float = 15.0) -> dict[str, Any]:
        deadline = time.monotonic() + timeout
        while not condition(found := self.status):
            assert time.monotonic() < deadline, f"waited for {what}: {found}"
            time.sleep(0.005)
        return found

    def wait_version(self, version: int) -> dict[str, Any]:
        return self.wait(f"version {version}", lambda s: s["version"] == version)

    def wait_ack(self, state: str) -> Any:
        found: Any = None

        def says_so(_: Any) -> bool:
            nonlocal found
            found = self.ledger.acknowledgements().get("r")
            return found is not None and found.state == state

        self.wait(f"an acknowledgement that says {state}", says_so)
        return found

    def close(self) -> None:
        self.coordinator.stop()
        self._pumping.join(5)


@pytest.fixture
def uri(tmp_path: Any) -> str:
    return str(tmp_path / "run")


@pytest.fixture
def weights() -> Weights:
    random = np.random.default_rng(0)
    return {name: random.integers(0, 2**15, shape).astype("<u2") for name, shape in SHAPES.items()}


@pytest.fixture
def replica_of(uri: str, weights: Weights) -> Iterator[Callable[..., Replica]]:
    made: list[Replica] = []

    def make(bits: Weights | None = None, **config: Any) -> Replica:
        made.append(Replica(uri, weights if bits is None else bits, **config))
        return made[-1]

    yield make
    for replica in made:
        replica.close()


@pytest.fixture
def trainer(uri: str, weights: Weights) -> Publisher:
    return Publisher(uri, weights)


def anchor(trainer: Publisher, manifest: Any) -> None:
    """What the fake ranks read as an anchor: both tensors' bytes, one after the other."""
    data = trainer.weights["w"].tobytes() + trainer.weights["norm"].tobytes()
    trainer.anchor(manifest, {"model.safetensors": data})


def other(weights: Weights) -> Weights:
    return {name: value ^ 3 for name, value in weights.items()}


def test_equal_live_bits_need_no_anchor_and_deltas_follow(trainer: Publisher, replica_of: Any) -> None:
    trainer.origin()
    replica = replica_of().start()
    first = replica.wait_version(1)
    assert (first["state"], first["lag"], first["anchors_taken"]) == ("live", 0, 0)
    for seed in range(3):
        manifest = trainer.step(seed, 0.3)
    status = replica.wait_version(4)
    assert replica.executor.equal(trainer.weights)
    assert status["state_digest"] == manifest.state_digest
    assert status["manifest"] == manifest.sha256
    assert status["changed_elements_last"] > 0
    assert status["refusal"] is None


def test_a_replica_started_before_the_run_waits_for_it(trainer: Publisher, replica_of: Any) -> None:
    replica = replica_of().start()
    time.sleep(0.1)
    assert (replica.status["state"], replica.status["newest_version"]) == ("waiting", None)
    trainer.origin()
    trainer.step(1)
    replica.wait_version(2)


def test_a_late_replica_folds_the_chain_after_the_newest_anchor(trainer: Publisher, replica_of: Any, weights) -> None:
    trainer.origin()
    anchor(trainer, trainer.step(1))
    for seed in (2, 3, 4):
        trainer.step(seed, 0.5)
    replica = replica_of(other(weights)).start()
    status = replica.wait_version(5)
    assert replica.executor.equal(trainer.weights)
    assert (status["anchors_taken"], status["commits"]) == (1, 1)


def test_without_a_way_the_newest_version_is_refused_until_an_anchor_comes(trainer, replica_of, weights) -> None:
    newest = trainer.origin()
    replica = replica_of(other(weights)).start()
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert status["state"] == "refused"
    assert (status["refusal"]["version"], status["refusal"]["kind"]) == (1, "ChainError")
    assert replica.executor.equal(other(weights))
    ack = replica.wait_ack("refused")
    assert (ack.version, ack.refused_version) == (None, 1)
    anchor(trainer, newest)
    status = replica.wait_version(1)
    assert (status["state"], status["refusal"], status["refusals"]) == ("live", None, 1)
    replica.wait_ack("live")


def test_an_origin_whose_anchor_follows_at_once_is_no_refusal(uri, trainer, replica_of, weights) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    second = Publisher(uri, other(weights))
    newest = second.origin()
    time.sleep(0.3)
    anchor(second, newest)
    assert replica.wait_version(2)["refusals"] == 0
    assert replica.executor.equal(other(weights))


def test_a_damaged_object_is_refused_and_healed_by_putting_it_again(trainer, replica_of, weights) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    trainer.change(1)
    manifest = trainer.delta(corrupt="object")
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert status["refusal"]["object"] == manifest.objects[0].key
    assert (status["refusal"]["kind"], status["version"], status["lag"]) == ("IntegrityError", 1, 1)
    assert replica.executor.equal(weights)
    assert replica.wait_ack("refused").refused_object == manifest.objects[0].key
    trainer.heal(manifest)
    assert replica.wait_version(2)["refusal"] is None
    assert replica.executor.equal(trainer.weights)


def test_wrong_content_is_refused_before_weights_are_touched_and_healed_by_an_anchor(
    trainer: Publisher, replica_of: Any, weights: Weights
) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    bad = trainer.step(1, corrupt="content")
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert (status["refusal"]["version"], status["refusal"]["kind"]) == (2, "IntegrityError")
    assert "commit" not in replica.executor.calls
    assert replica.executor.equal(weights)
    time.sleep(0.6)  # several tries later it is still one refusal
    assert replica.status["refusals"] == 1
    anchor(trainer, bad)
    status = replica.wait_version(2)
    assert status["anchors_taken"] == 1
    assert replica.executor.equal(trainer.weights)
    trainer.step(2)
    replica.wait_version(3)
    assert replica.executor.equal(trainer.weights)


def test_a_resumed_trainer_with_other_weights_is_followed_by_its_anchor(trainer, replica_of, uri, weights) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    trainer.step(1)
    replica.wait_version(2)
    resumed = Publisher(uri, other(weights))
    anchor(resumed, resumed.origin())
    status = replica.wait_version(3)
    assert (status["epoch"], status["anchors_taken"]) == (2, 1)
    assert replica.executor.equal(resumed.weights)


@pytest.mark.parametrize("guilty", [{0}, {1}, {0, 1}])
def test_a_rank_that_fails_to_commit_takes_all_back(trainer, replica_of, weights, guilty: set[int]) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    generation = replica.status["commit_generation"]
    for index in guilty:
        replica.executor.ranks[index].fail = {"commit"}
    trainer.step(1, 0.5)
    status = replica.wait("rollback", lambda s: s["rollbacks"])
    assert replica.executor.equal(weights)
    assert (status["version"], status["state"], status["refusal"]) == (1, "live", None)
    assert "rank" in status["last_error"]["error"]
    assert status["commit_generation"] > generation  # nothing cached around a rollback is found again
    for rank in replica.executor.ranks:
        rank.fail = set()
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)
    replica.wait("the scan after a rollback", lambda s: s["audit"]["completed"])


def test_commit_check_and_undo_happen_in_one_call_of_the_engine_thread(trainer, replica_of) -> None:
    """So no step can fall between a half commit and its undo, and no request needs a retry."""
    trainer.origin()
    replica = replica_of()
    inside: list[tuple[str, int]] = []
    calls = [0]
    pump = replica.main.pump

    def counting() -> None:
        calls[0] += 1
        pump()

    replica.main.pump = counting
    replica.start()
    replica.wait_version(1)
    replica.executor.ranks[1].fail = {"commit"}
    replica.executor.before = lambda method: inside.append((method, calls[0]))
    trainer.step(1, 0.5)
    replica.wait("rollback", lambda s: s["rollbacks"])
    commit = next(at for method, at in inside if method == "commit")
    undo = next(at for method, at in inside if method == "undo")
    assert commit == undo


def test_a_failed_undo_ends_the_engine(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    replica.executor.ranks[0].fail = {"commit"}
    replica.executor.ranks[1].fail = {"undo"}
    trainer.step(1)
    replica.wait("the end", lambda _: replica.broken)
    assert "could not be undone" in str(replica.broken)
    assert replica.status["version"] == 1


def test_a_worker_that_raises_ends_the_engine(trainer, replica_of) -> None:
    replica = replica_of().start()

    def explode(method: str) -> None:
        raise RuntimeError("lost a worker")

    trainer.origin()
    replica.wait_version(1)
    replica.executor.before = explode
    trainer.step(1)
    replica.wait("the end", lambda _: replica.broken)
    assert "lost a worker" in str(replica.broken)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_cannot_stage_is_a_refusal_and_both_drop(trainer, replica_of, weights, rank: int) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    replica.executor.ranks[rank].fail = {"stage"}
    trainer.step(1)
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert status["refusal"]["kind"] == "Injected"
    assert replica.executor.calls[-1] == "stage_drop" or "stage_drop" in replica.executor.calls
    assert replica.executor.equal(weights)
    replica.executor.ranks[rank].fail = set()
    replica.wait_version(2)


def test_a_rank_that_cannot_drop_hides_no_error(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    replica.executor.ranks[1].fail = {"stage", "stage_drop"}
    trainer.step(1)
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert status["refusal"]["error"] == "rank 1: stage fails"
    replica.executor.ranks[1].fail = {"commit", "stage_drop"}
    replica.wait("a rollback", lambda s: s["rollbacks"])
    replica.executor.ranks[1].fail = set()
    assert replica.wait_version(2)["refusals"] == 1


def test_ranks_that_disagree_about_a_copy_are_refused(trainer, replica_of, weights) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    replica.executor.ranks[1].skew = 5
    trainer.step(1)
    status = replica.wait("refusal", lambda s: s["refusal"])
    assert "copies of region" in status["refusal"]["error"]
    assert replica.executor.equal(weights)


def test_a_store_error_while_staging_is_no_refusal(trainer, replica_of, monkeypatch) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    rank = replica.executor.ranks[0]
    good = rank.ledger
    failures = [2]

    class Flaky:
        def read_object(self, ref: Any) -> bytes:
            if failures[0]:
                failures[0] -= 1
                raise StoreError("store", got="time-out")
            return good.read_object(ref)

    rank.ledger = Flaky()  # type: ignore[assignment]
    trainer.step(1)
    status = replica.wait_version(2)
    assert (status["refusals"], status["last_error"]["kind"]) == (0, "RankError")


def test_the_audit_finds_a_flipped_bit_and_an_anchor_heals_it(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of(audit_commits=2).start()
    replica.wait_version(1)
    for rank in replica.executor.ranks:
        rank.live["norm"][0] ^= 1  # both copies alike, so that only the digest can tell
    trainer.step(1)
    status = replica.wait("poison", lambda s: s["state"] == "poisoned")
    assert status["version"] is None
    assert "norm" in status["last_error"]["error"]
    replica.wait_ack("poisoned")
    anchor(trainer, trainer.writer.head)
    status = replica.wait_version(2)
    assert status["state"] == "live"
    assert replica.executor.equal(trainer.weights)


def test_what_is_served_of_quantised_weights_is_made_anew_where_a_scan_finds_damage(trainer, replica_of) -> None:
    """The weights are proven all the same, so it takes no anchor."""
    trainer.origin()
    replica = replica_of(audit_commits=2).start()
    replica.wait_version(1)
    replica.executor.ranks[1].damaged = "layers.0.qkv_proj"
    trainer.step(1)
    status = replica.wait("heal", lambda s: s["commit_generation"] == 2)
    assert replica.executor.ranks[1].damaged is None
    assert (status["version"], status["state"], status["anchors_taken"]) == (2, "live", 0)
    assert "rank 1 serves of module 'layers.0.qkv_proj'" in status["last_error"]["error"]
    assert replica.executor.equal(trainer.weights)


def test_modules_that_a_scan_looked_at_in_vain_are_looked_at_again(trainer, replica_of) -> None:
    """Of a scan that a commit crosses nothing counts: else some modules' turn would come in such scans only."""
    trainer.origin()
    replica = replica_of(audit_commits=4)
    turns = []
    for rank in replica.executor.ranks:
        poll, begin = rank.audit_poll, rank.audit_begin
        rank.audit_poll = lambda poll=poll: (
            poll() if replica.executor.calls.count("commit") > 2 else {"state": "running"}
        )
        rank.audit_begin = lambda again, begin=begin: [turns.append(again), begin(again)][1]
    replica.start()
    replica.wait_version(1)
    for seed in range(3):  # the second begins a scan, which the third crosses
        replica.wait_version(trainer.step(seed).version)
    replica.wait("a scan that counts", lambda s: s["audit"]["completed"] == 1)
    assert turns == [False, False, True, True]
    assert (replica.status["audit"]["began_at_last"], replica.status["audit"]["ended_at_last"]) == (100.0, 201.0)
    replica.coordinator.scan().result(10)
    assert turns[4:6] == [False, False]


def test_copies_that_drift_apart_are_poison_too(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of(audit_commits=2).start()
    replica.wait_version(1)
    replica.executor.ranks[1].live["norm"][0] ^= 1
    trainer.step(1)
    replica.wait("poison", lambda s: s["state"] == "poisoned")
    anchor(trainer, trainer.writer.head)
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)


def test_of_copies_on_one_rank_that_differ_an_anchor_says_which_is_right(trainer, replica_of) -> None:
    """Their sums may be what was proven: those of the copy that is not damaged."""
    trainer.origin()
    replica = replica_of(audit_commits=2).start()
    replica.wait_version(1)
    rank = replica.executor.ranks[1]
    rank.unequal = KEYS[1]["norm"]
    trainer.step(1)
    status = replica.wait("poison", lambda s: s["state"] == "poisoned")
    assert "rank 1's copies of live region 'norm" in status["last_error"]["error"]
    rank.unequal = None
    anchor(trainer, trainer.writer.head)
    assert replica.wait_version(2)["anchors_taken"] == 1
    assert replica.executor.equal(trainer.weights)


def test_a_scan_that_fails_is_none(trainer, replica_of) -> None:
    """It is tried again until it succeeds, commits wait for it, and who asked for one hears why there is none."""
    trainer.origin()
    replica = replica_of(audit_commits=2).start()
    replica.wait_version(1)
    rank = replica.executor.ranks[1]
    for method in ("audit_poll", "audit_begin"):
        rank.fail = {method}
        assert replica.coordinator.scan().result(10) == {"error": f"rank 1: {method} fails"}
    for seed in range(2):
        replica.wait_version(trainer.step(seed).version)
    waiting = trainer.step(2).version
    replica.wait("it to be seen", lambda s: s["newest_version"] == waiting)
    tried = replica.executor.calls.count("audit_begin")
    replica.wait("another try", lambda s: replica.executor.calls.count("audit_begin") > tried + 1)
    assert (replica.status["version"], replica.status["audit"]["completed"]) == (waiting - 1, 0)
    assert "audit_begin fails" in replica.status["last_error"]["error"]
    rank.fail = set()
    assert replica.wait_version(waiting)["audit"]["completed"] >= 1


def test_who_asks_while_a_scan_runs_waits_for_the_next(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    rank, hold = replica.executor.ranks[0], threading.Event()
    poll = rank.audit_poll
    rank.audit_poll = lambda: poll() if hold.is_set() else {"state": "running"}
    first = replica.coordinator.scan()
    replica.wait("the scan", lambda s: s["audit"]["state"] == "running")
    second = replica.coordinator.scan()
    hold.set()
    assert first.result(10) == second.result(10)
    assert replica.executor.calls.count("audit_begin") == 2


def test_commits_wait_for_the_audit_that_is_due(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of(audit_commits=2)
    hold = threading.Event()
    poll = type(replica.executor.ranks[0]).audit_poll

    def slow(rank: Any) -> dict[str, Any]:
        return poll(rank) if hold.is_set() else {"state": "running"}

    for rank in replica.executor.ranks:
        rank.audit_poll = lambda rank=rank: slow(rank)  # type: ignore[method-assign]
    replica.start()
    replica.wait_version(1)
    trainer.step(1)
    replica.wait_version(2)
    trainer.step(2)
    replica.wait_version(3)
    trainer.step(3)
    replica.wait("version 4 to be seen", lambda s: s["newest_version"] == 4)
    time.sleep(0.2)
    assert replica.status["version"] == 3
    hold.set()
    replica.wait_version(4)
    assert replica.status["audit"]["completed"] >= 1


def too_small(replica: Replica) -> None:
    for rank in replica.executor.ranks:
        rank.too_small = True


def test_an_anchor_too_large_to_stage_is_loaded_while_the_engine_is_paused(trainer, replica_of, weights) -> None:
    replica = replica_of(other(weights))
    too_small(replica)
    paused: list[bool] = []
    replica.executor.before = lambda method: paused.append(replica.pause.paused) if method == "load_dense" else None
    anchor(trainer, trainer.origin())
    replica.start()
    status = replica.wait_version(1)
    assert paused == [True]
    assert not replica.pause.paused
    assert (status["state"], status["anchors_taken"], status["commit_generation"]) == ("live", 1, 1)
    assert replica.executor.equal(trainer.weights)
    trainer.step(1)
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)


def test_an_anchor_of_another_model_pauses_nothing(trainer, replica_of, uri) -> None:
    """However large it is: before a load in place begins, its names are looked at."""
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    too_small(replica)
    for version, strangers in enumerate(
        ({**trainer.weights, "more": np.zeros(2, "<u2")}, {"w": trainer.weights["w"]}), 2
    ):
        stranger = Publisher(uri, strangers)
        stranger.anchor(stranger.origin())
        status = replica.wait(f"refusal {version}", lambda s, v=version: s["refusal"] and s["refusal"]["version"] == v)
        assert status["refusal"]["kind"] == "MappingError"
        assert (status["state"], status["version"], status["ready"]) == ("refused", 1, True)
    assert "load_dense" not in replica.executor.calls
    assert replica.pause.times == 0


def test_damage_that_a_delta_meets_is_found_out_at_once(trainer, replica_of) -> None:
    """Not at the next audit: until then good anchors would be refused too, as what they are compared with is wrong."""
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    for rank in replica.executor.ranks:
        rank.live["norm"][:] ^= 1 << 15
    trainer.change(1, 1.0)
    newest = trainer.delta()
    replica.wait("poison", lambda s: s["state"] == "poisoned")
    anchor(trainer, newest)
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)


def test_a_store_that_fails_is_not_asked_without_end(trainer, replica_of, monkeypatch) -> None:
    """Not after a hint either, which ends one look early."""
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    asked: list[float] = []

    def broken(*_: Any, **__: Any) -> Any:
        asked.append(time.monotonic())
        raise StoreError("store", expected="an answer", got="none")

    for name in ("head", "wait_newer"):
        monkeypatch.setattr(replica.ledger, name, broken)
    replica.wait("an error", lambda s: s["last_error"])
    replica.coordinator.hint()
    asked.clear()
    time.sleep(1)
    assert len(asked) < 20


def test_who_waits_for_the_newest_version_holds_up_nobody(trainer, replica_of, monkeypatch) -> None:
    trainer.origin()
    replica = replica_of()
    monkeypatch.setattr(replica.ledger, "head", lambda: (_ for _ in ()).throw(StoreError("head", expected=1, got=2)))
    waiting = replica.coordinator.wait_for(None, 60)
    replica.start()
    replica.wait_version(1)
    assert not waiting.done()
    monkeypatch.undo()
    assert waiting.result(10)["reached"]


def test_a_refused_version_that_is_gone_is_refused_no_longer(trainer, replica_of, monkeypatch) -> None:
    first = trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    trainer.step(1, corrupt="object")
    replica.wait("refusal", lambda s: s["refusal"])
    monkeypatch.setattr(replica.ledger, "head", lambda: first)
    assert replica.wait("nothing refused", lambda s: s["refusal"] is None)["state"] == "live"
    assert replica.wait_ack("live").refused_version is None


def test_what_is_refused_while_a_version_is_pinned_is_that_version(trainer, replica_of) -> None:
    """So that the trainer attaches an anchor to the one that the replica waits for."""
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    assert replica.coordinator.command("pin", None, 10).result(10)["ok"]
    newest = trainer.step(1)
    replica.wait("it to be seen", lambda s: s["newest_version"] == newest.version)
    replica.executor.ranks[0].live["w"][0, 0] ^= 1
    replica.coordinator.scan().result(10)
    assert replica.wait("the refusal", lambda s: s["refusal"])["refusal"]["version"] == 1
    looks: list[int] = []
    plan = replica.ledger.plan
    replica.ledger.plan = lambda *args, **more: [looks.append(1), plan(*args, **more)][1]  # type: ignore[method-assign]
    time.sleep(2)
    assert len(looks) <= 6, "it is tried again ever more slowly, up to every half second here"


def test_a_client_whose_version_is_above_a_pin_waits_no_longer(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    waiting = replica.coordinator.wait_for(2, 60)
    assert replica.coordinator.command("pin", None, 10).result(10)["ok"]
    assert not waiting.result(10)["reached"]


def test_a_load_that_fails_keeps_the_engine_paused_until_one_succeeds(trainer, replica_of, weights) -> None:
    replica = replica_of(other(weights))
    too_small(replica)
    anchor(trainer, trainer.origin())
    trainer.step(1)
    replica.executor.ranks[1].fail = {"load_dense"}
    replica.start()
    status = replica.wait("the refusal", lambda s: s["refusal"])
    assert (status["state"], status["version"]) == ("poisoned", None)
    time.sleep(0.5)
    assert replica.pause.paused
    assert replica.status["version"] is None
    replica.executor.ranks[1].fail = set()
    status = replica.wait_version(2)
    assert status["state"] == "live"
    assert not replica.pause.paused
    assert replica.executor.equal(trainer.weights)


def test_failing_acknowledgements_are_reported_and_harmless(trainer, replica_of, monkeypatch) -> None:
    replica = replica_of()

    def broken(ack: Any) -> None:
        raise StoreError("store", got="read-only")

    monkeypatch.setattr(replica.ledger, "acknowledge", broken)
    replica.start()
    trainer.origin()
    replica.wait_version(1)
    status = replica.wait("the report", lambda s: s["last_error"])
    assert "read-only" in status["last_error"]["error"]


def test_no_acknowledgement_if_not_wanted(trainer, replica_of) -> None:
    replica = replica_of(acknowledge=False).start()
    trainer.origin()
    replica.wait_version(1)
    assert replica.ledger.acknowledgements() == {}


def test_waiting_clients_get_their_answer(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of().start()
    newest = replica.coordinator.wait_for(None, 10).result(10)
    assert (newest["reached"], newest["version"]) == (True, 1)
    later = replica.coordinator.wait_for(2, 10)
    never = replica.coordinator.wait_for(9, 0.2).result(10)
    assert (never["reached"], never["wanted_version"]) == (False, 9)
    trainer.step(1)
    assert later.result(10)["version"] == 2


def test_clients_are_not_left_waiting_while_the_store_fails(trainer, replica_of, monkeypatch) -> None:
    replica = replica_of()

    def broken(*_: Any, **__: Any) -> Any:
        raise StoreError("store", got="time-out")

    for name in ("head", "wait_newer"):
        monkeypatch.setattr(replica.ledger, name, broken)
    replica.start()
    answer = replica.coordinator.wait_for(None, 0.5).result(10)
    assert not answer["reached"]
    assert "time-out" in answer["last_error"]["error"]


def test_a_scan_on_demand_is_fresh(trainer, replica_of) -> None:
    manifest = trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    answer = replica.coordinator.scan().result(10)
    assert (answer["version"], answer["state_digest"]) == (1, manifest.state_digest)
    replica.executor.ranks[0].live["w"][0, 0] ^= 1
    answer = replica.coordinator.scan().result(10)
    assert answer["version"] is None
    assert answer["state_digest"] != manifest.state_digest


def test_another_model_is_refused_by_name(uri, replica_of) -> None:
    stranger = Publisher(uri, {"w": np.zeros((2, 2), "<u2")})
    stranger.anchor(stranger.origin())
    status = replica_of().start().wait("refusal", lambda s: s["refusal"])
    assert "'w'" in status["refusal"]["error"]


def test_a_rank_that_cannot_attach_stops_the_start(uri, weights, monkeypatch) -> None:
    executor = Executor(Ledger(open_store(uri)), weights)
    executor.ranks[1].fail = {"attach"}
    with pytest.raises(RankError, match="rank 1"):
        Live(ReplicaConfig(uri), Ranks(executor.collective_rpc), MainThread(threading.Event()), CacheSalt(), Pause())


def test_the_fake_layout_is_a_real_one() -> None:
    assert KEYS[0]["norm"] == KEYS[1]["norm"]
    assert KEYS[0]["w"] != KEYS[1]["w"]


def test_a_damaged_newest_manifest_is_a_refusal_and_healed(
    uri: str, trainer: Publisher, replica_of: Callable[..., Replica]
) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    store = trainer.ledger.store
    create = store.create

    def create_damaged(key: str, data: bytes | memoryview) -> None:
        create(key, bytes(data[:-9]) if key.startswith("manifests/") else data)

    store.create = create_damaged  # type: ignore[method-assign]
    trainer.change(1)
    manifest = trainer.delta()
    status = replica.wait("a refusal", lambda s: s["state"] == "refused")
    assert (status["version"], status["newest_version"], status["refusal"]["version"]) == (1, 2, 2)
    assert replica.wait_ack("refused").refused_version == 2
    trainer.heal(manifest)
    replica.wait_version(2)
    assert replica.status["refusal"] is None


def test_the_status_says_when_the_store_answered_last(
    uri: str, trainer: Publisher, replica_of: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    answered = replica.status["looked_at"]
    replica.wait("another look", lambda s: s["looked_at"] > answered)

    def fails(key: str, *, max_bytes: int) -> bytes:
        raise StoreError(key, expected="an answer", got="none")

    monkeypatch.setattr(replica.ledger.store, "get", fails)
    replica.wait("an error", lambda s: s["last_error"])
    answered = replica.status["looked_at"]
    time.sleep(0.6)
    assert replica.status["looked_at"] == answered


def test_a_bug_beside_the_coordinator_lets_no_client_wait_for_ever(
    replica_of: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    replica = replica_of()
    expire, calls = replica.live.gate.expire, []

    def once() -> None:
        calls.append(len(calls))
        if len(calls) == 1:
            raise RuntimeError("a bug")
        expire()

    monkeypatch.setattr(replica.live.gate, "expire", once)
    replica.start()
    replica.wait("a word in status", lambda s: s["last_error"] and s["last_error"]["error"] == "a bug")
    monkeypatch.setattr(replica.coordinator, "turn", lambda: time.sleep(0.01))  # nor does its own thread help
    assert not replica.coordinator.wait_for(2, 0.2).result(timeout=5)["reached"]


def test_a_store_that_does_not_answer_holds_up_no_client(
    trainer: Publisher, replica_of: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_plugin.store_clock._SLOW", 0.3)
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    gate = threading.Event()
    get = replica.ledger.store.get

    def hangs(key: str, *, max_bytes: int) -> bytes:
        gate.wait(30)
        return get(key, max_bytes=max_bytes)

    monkeypatch.setattr(replica.ledger.store, "get", hangs)
    time.sleep(0.1)
    answer = replica.coordinator.wait_for(2, 0.5).result(timeout=3)
    assert (answer["reached"], answer["version"]) == (False, 1)
    replica.wait("a word in status", lambda s: s["last_error"] and "none yet" in s["last_error"]["error"])
    trainer.step(1)
    gate.set()
    replica.wait_version(2)


def test_a_store_that_takes_no_acknowledgement_is_named(
    trainer: Publisher, replica_of: Callable[..., Replica], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm_delta_plugin.store_clock._SLOW", 0.3)
    trainer.origin()
    replica = replica_of()
    gate = threading.Event()
    acknowledge = replica.ledger.acknowledge

    def hangs(ack: Any) -> None:
        gate.wait(30)
        acknowledge(ack)

    monkeypatch.setattr(replica.ledger, "acknowledge", hangs)
    replica.start()
    replica.wait("a word in status", lambda s: s["last_error"] and "an acknowledgement" in s["last_error"]["error"])
    assert replica.status["version"] == 1
    gate.set()
    trainer.step(1)
    replica.wait_version(2)


def test_a_store_that_holds_another_run_is_followed_with_a_word(
    uri: str, trainer: Publisher, replica_of: Callable[..., Replica], weights: Weights, caplog: pytest.LogCaptureFixture
) -> None:
    trainer.origin()
    replica = replica_of().start()
    first = replica.wait_version(1)["run"]
    assert first == trainer.writer.run
    logging.getLogger("vllm.delta_sync").addHandler(caplog.handler)  # vLLM's loggers do not propagate
    Path(uri).rename(f"{uri}-gone")  # at once: the replica writes there
    second = Publisher(uri, other(weights))
    anchor(second, second.origin())
    status = replica.wait("the other run", lambda s: s["run"] != first)
    assert status["run"] == second.writer.run
    assert replica.executor.equal(other(weights))
    logging.getLogger("vllm.delta_sync").removeHandler(caplog.handler)
    assert "holds run" in caplog.text


def test_the_parts_of_an_engine_know_its_ranks_and_its_model(tmp_path, monkeypatch, weights: Weights) -> None:
    monkeypatch.chdir(tmp_path)
    executor = Executor(Ledger(open_store("run")), weights)
    facts = EngineFacts("m", "bfloat16", "processed_logprobs", None)
    sync = DeltaSync(ReplicaConfig("run"), facts, executor.collective_rpc, lambda: None, lambda *_: Pause())
    status = sync.status()
    assert status["uri"] == f"file://{tmp_path}/run"
    assert (set(status["codecs"]), status["ranks"]) == ({DEFAULT_CODEC, PLANE_CODEC, CONTEXT_CODEC}, 2)
    assert sync._coordinator._ledger.limits == for_model(len(SHAPES))


def test_a_worker_that_raises_while_a_tensor_is_read_ends_the_engine(tmp_path, weights: Weights) -> None:
    """vLLM tells only the client what a utility raises; with replies out of step the engine must not go on."""
    executor = Executor(Ledger(open_store(str(tmp_path))), weights)
    facts = EngineFacts("m", "bfloat16", "processed_logprobs", None)
    config = ReplicaConfig(str(tmp_path), read_back=True)
    woken: list[bool] = []
    sync = DeltaSync(config, facts, executor.collective_rpc, lambda: woken.append(True), lambda *_: Pause())
    executor.ranks[1].fail = {"read_tensor"}
    assert "rank" in sync.read_tensor("w")["error"]

    def explode(method: str) -> None:
        raise RuntimeError("lost a worker")

    executor.before = explode
    with pytest.raises(EngineBroken):
        sync.read_tensor("w")
    assert woken == [True]
    with pytest.raises(EngineBroken, match="lost a worker"):
        sync.main.pump()


def test_a_replica_tells_its_store_that_it_follows(uri: str, replica_of, monkeypatch) -> None:
    told = []
    replica = replica_of()
    monkeypatch.setattr(replica.ledger.store, "follow", lambda: told.append(True))
    replica.start()
    assert told == [True]


def turns(replica: Replica, until: Callable[[dict[str, Any]], Any], timeout: float = 15.0) -> dict[str, Any]:
    """Take the coordinator's turns here, so that what happens between two of them is the test's to choose."""
    deadline = time.monotonic() + timeout
    while not until(replica.status):
        assert time.monotonic() < deadline, replica.status
        replica.coordinator.turn()
    return replica.status


def test_old_versions_deleted_while_they_are_read_are_passed_by_an_anchor(trainer, replica_of, uri) -> None:
    trainer.origin()
    replica = replica_of(acknowledge=False)
    turns(replica, lambda s: s["version"] == 1)
    trainer.step(1)
    anchor(trainer, trainer.step(2))
    trainer.step(3)

    def trim(method: str) -> None:
        if method == "stage_begin":
            replica.executor.before = lambda name: None
            found = find_trim(replica.ledger, 1, 0.0)
            assert found.first_kept == 3
            delete(replica.ledger.store, found.keys)

    replica.executor.before = trim
    status = turns(replica, lambda s: s["version"] == 4)
    assert replica.executor.equal(trainer.weights)
    assert (status["refusals"], status["anchors_taken"]) == (0, 1)
    assert (
        status["last_error"]["kind"] == "NotFoundError" and "taking an anchor instead" in status["last_error"]["error"]
    )
    trainer.step(4)
    turns(replica, lambda s: s["version"] == 5)


def test_what_is_lost_with_no_way_round_is_refused_in_the_end(trainer, replica_of) -> None:
    trainer.origin()
    replica = replica_of()
    turns(replica, lambda s: s["version"] == 1)
    anchor(trainer, trainer.step(1))
    manifest = trainer.step(2)
    replica.ledger.store.delete(manifest.objects[0].key)
    status = turns(replica, lambda s: s["refusal"])
    assert (status["refusal"]["kind"], status["refusal"]["version"]) == ("NotFoundError", 3)
    assert replica.wait_ack("refused").refused_object == manifest.objects[0].key
    trainer.heal(manifest)
    turns(replica, lambda s: s["version"] == 3)
    assert replica.executor.equal(trainer.weights)


@pytest.mark.parametrize("damaged", [False, True])
def test_a_fold_is_taken_and_one_that_is_damaged_gives_way_to_the_deltas(trainer, replica_of, uri, damaged) -> None:
    trainer.origin()
    replica = replica_of()
    turns(replica, lambda s: s["version"] == 1)
    for seed in (1, 2, 3):
        trainer.step(seed)
    made = CliRunner().invoke(app, ["compact", uri, "--from", "1", "--json"])
    (key,) = json.loads(made.stdout)["objects"]
    if damaged:
        replica.ledger.store.put(key, b"other bytes")
    status = turns(replica, lambda s: s["version"] == 4)
    assert replica.executor.equal(trainer.weights)
    assert status["refusals"] == damaged
    assert any(key == rank.key for rank in replica.executor.ranks) != damaged
