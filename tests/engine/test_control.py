"""What an operator asks of a replica, over two in-memory ranks: going back, being unable to, and staying."""

# ruff: noqa: F811
from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from helpers.publish import Publisher
from test_coordinator import Replica, anchor, other, replica_of, trainer, uri, weights  # noqa: F401
from test_fallback import spoil_anchor

from delta_sync.errors import FormatError, StoreError


def order(replica: Replica, action: str, version: int | None = None, timeout: float = 10.0) -> dict[str, Any]:
    return replica.coordinator.command(action, version, timeout).result(20)


@pytest.fixture
def replica(trainer: Publisher, replica_of: Any) -> Replica:
    """At version 4 of 4, without any anchor."""
    trainer.origin()
    replica = replica_of().start()
    for seed in range(3):
        trainer.step(seed, 0.5)
    replica.wait_version(4)
    return replica


def test_a_rollback_undoes_deltas_and_stays(trainer: Publisher, replica: Replica) -> None:
    answer = order(replica, "rollback", 2)
    assert (answer["ok"], answer["code"], answer["error"]) == (True, 200, None)
    status = answer["status"]
    assert (status["version"], status["pinned"], status["newest_version"], status["lag"]) == (2, 2, 4, 2)
    assert status["state_digest"] == trainer.ledger.manifest(2).state_digest
    trainer.step(9)
    replica.wait("the newest", lambda s: s["newest_version"] == 5)
    assert replica.status["version"] == 2
    assert order(replica, "unpin")["ok"]
    assert replica.wait_version(5)["pinned"] is None
    assert replica.executor.equal(trainer.weights)


def test_a_rollback_takes_an_anchor_where_deltas_do_not_lead_back(trainer: Publisher, replica: Replica) -> None:
    before = {name: bits.copy() for name, bits in trainer.weights.items()}
    anchor(trainer, trainer.writer.head)
    for seed in (7, 8):
        damaged = trainer.step(seed)
    replica.wait_version(6)
    trainer.damage(damaged)
    answer = order(replica, "rollback", 4)
    assert (answer["ok"], answer["status"]["version"], answer["status"]["anchors_taken"]) == (True, 4, 1)
    assert replica.executor.equal(before)


def test_a_rollback_goes_over_a_trainer_that_resumed_exactly(trainer: Publisher, replica: Replica) -> None:
    trainer.origin()
    trainer.step(8, 0.5)
    replica.wait_version(6)
    for version in (2, 5, 4):  # over that origin, to it, and from it, where there is nothing to undo
        answer = order(replica, "rollback", version)
        assert answer["ok"], answer["error"]
        assert (answer["status"]["version"], answer["status"]["anchors_taken"]) == (version, 0)
        assert answer["status"]["state_digest"] == trainer.ledger.manifest(version).state_digest
        if version != 5:
            assert order(replica, "unpin")["ok"]
            replica.wait_version(6)
    assert replica.executor.equal(trainer.weights)


def test_a_reload_goes_around_a_damaged_anchor(trainer: Publisher, replica: Replica) -> None:
    anchor(trainer, trainer.writer.head)
    newest = trainer.step(7)
    anchor(trainer, newest)
    replica.wait_version(5)
    replica.executor.ranks[0].live["w"][0, 0] ^= 1
    spoil_anchor(trainer, 5)
    answer = order(replica, "reload")
    assert answer["ok"], answer
    assert (answer["status"]["version"], answer["status"]["state"]) == (5, "live")
    assert replica.executor.equal(trainer.weights)
    assert "the anchor of version 5 is left out" in answer["status"]["last_error"]["error"]
    spoil_anchor(trainer, 4)
    answer = order(replica, "reload")
    assert answer["code"] == 409 and "No other way" in answer["error"]


def test_a_record_on_the_way_back_that_is_not_allowed_is_passed_by_an_anchor(
    trainer: Publisher, replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    anchor(trainer, trainer.writer.head)
    before = {name: bits.copy() for name, bits in trainer.weights.items()}
    trainer.step(7)
    replica.wait_version(5)

    def refused(*_: Any) -> Any:
        raise FormatError("manifest", expected="a signature", got="none")

    monkeypatch.setattr("vllm_delta_plugin.control.plan_back", refused)
    assert replica.coordinator.command("rollback", 4, 10, dry_run=True).result(20)["ok"]
    assert order(replica, "rollback", 4)["ok"]
    assert replica.executor.equal(before)


def test_without_any_way_back_nothing_changes(trainer: Publisher, replica: Replica) -> None:
    trainer.damage(trainer.ledger.manifest(4))
    answer = order(replica, "rollback", 2)
    assert (answer["ok"], answer["code"]) == (False, 409)
    assert "attach an anchor" in answer["error"]
    assert (answer["status"]["version"], answer["status"]["pinned"]) == (4, None)
    assert replica.executor.equal(trainer.weights)
    trainer.step(9)
    replica.wait_version(5)


def test_a_rank_that_fails_a_rollback_leaves_all_where_they_were(trainer: Publisher, replica: Replica) -> None:
    replica.executor.ranks[1].fail.add("commit")
    assert order(replica, "rollback", 3)["code"] == 409
    assert replica.status["version"] == 4
    assert replica.executor.equal(trainer.weights)
    assert replica.coordinator.status.measures.failures["RolledBack"] == replica.status["rollbacks"] == 1
    replica.executor.ranks[1].fail.clear()
    assert order(replica, "rollback", 3)["ok"]


def test_only_a_rollback_goes_back_and_only_a_pin_goes_on(replica: Replica) -> None:
    assert "use rollback" in order(replica, "pin", 3)["error"]
    assert order(replica, "rollback", 3)["ok"]
    assert "use pin" in order(replica, "rollback", 4)["error"]
    assert "version 9" in order(replica, "pin", 9)["error"]
    assert order(replica, "pin", 4)["status"]["pinned"] == 4


def test_nothing_can_be_held_before_there_is_a_version(replica_of: Any) -> None:
    replica = replica_of().start()
    assert (order(replica, "pin")["code"], order(replica, "reload")["code"]) == (409, 409)
    assert replica.status["pinned"] is None


def test_poisoned_while_held_it_comes_back_to_the_version_held(trainer: Publisher, replica: Replica) -> None:
    anchor(trainer, trainer.writer.head)
    held = {name: bits.copy() for name, bits in trainer.weights.items()}
    assert order(replica, "pin")["ok"]
    trainer.step(9)
    replica.executor.ranks[0].live["w"][0, 0] ^= 1
    answer = order(replica, "reload")
    assert answer["ok"], answer
    assert (answer["status"]["version"], answer["status"]["pinned"], answer["status"]["state"]) == (4, 4, "live")
    assert replica.executor.equal(held)


def test_a_command_that_takes_long_is_answered_in_time_and_goes_on(replica: Replica) -> None:
    go = threading.Event()
    replica.executor.before = lambda method: go.wait(10) if method == "commit" else None  # type: ignore[assignment]
    answer = order(replica, "rollback", 3, timeout=0.3)
    assert (answer["ok"], answer["code"]) == (False, 504)
    go.set()
    replica.wait_version(3)


def test_a_store_that_fails_is_said_to_be_the_reason(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise StoreError("the store", expected="an answer", got="none")

    monkeypatch.setattr(replica.ledger, "manifest", fail)
    assert order(replica, "pin")["code"] == 503


def test_a_bug_is_answered_too(replica: Replica, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica.ledger, "manifest", lambda *_: 1 / 0)
    assert order(replica, "pin")["code"] == 500
    monkeypatch.undo()
    assert order(replica, "pin")["ok"]


def test_a_hint_is_followed_at_once(trainer: Publisher, replica_of: Any) -> None:
    trainer.origin()
    replica = replica_of(poll=30.0).start()
    replica.wait_version(1)
    time.sleep(0.2)
    trainer.step(1)
    replica.coordinator.hint()
    replica.wait_version(2)


@pytest.mark.parametrize("in_place", [False, True])
def test_running_requests_are_recomputed_or_end_first_if_so_configured(
    trainer: Publisher, replica_of: Any, weights: Any, in_place: bool
) -> None:
    trainer.origin()
    anchor(trainer, trainer.step(1))
    for transition, recomputed, drains in (("async", 0, 0), ("recompute", 1, 0), ("sync", 0, 1)):
        replica = replica_of(other(weights), transition=transition)
        for rank in replica.executor.ranks:
            rank.too_small = in_place
        replica.start().wait_version(2)
        assert (replica.pause.recomputed, replica.pause.drains) == (recomputed, drains)
        assert not replica.pause.paused
        assert not replica.live.gate.closed


@pytest.mark.parametrize("in_place", [False, True])
def test_requests_that_cannot_be_recomputed_hold_up_no_version(
    trainer: Publisher, replica_of: Any, weights: Any, in_place: bool
) -> None:
    anchor(trainer, trainer.origin())
    replica = replica_of(other(weights), transition="recompute")
    for rank in replica.executor.ranks:
        rank.too_small = in_place

    def moved() -> None:
        raise RuntimeError("a cache is being moved")

    replica.pause.recompute = moved
    status = replica.start().wait_version(1)
    assert (status["state"], status["last_error"]["error"]) == ("live", "a cache is being moved")
    assert not replica.pause.paused
    assert replica.executor.equal(trainer.weights)
