"""A replica that starts late where the newest version is damaged serves the one before it, says so, and is healed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from helpers.publish import Publisher
from test_coordinator import Replica, anchor, other, replica_of, too_small, trainer, turns, uri, weights

from delta_sync.store.keys import anchor_key

__all__ = ["replica_of", "trainer", "uri", "weights"]  # fixtures
Make = Callable[..., Replica]


def bits(trainer: Publisher) -> Any:
    return {name: value.copy() for name, value in trainer.weights.items()}


def spoil_anchor(trainer: Publisher, version: int) -> None:
    """One byte of its only file is another."""
    record = trainer.ledger.anchor(trainer.ledger.manifest(version))
    assert record is not None
    ref = record.objects[0]
    data = bytearray(trainer.ledger.store.get(ref.key, max_bytes=ref.size))
    data[-1] ^= 1
    trainer.ledger.store.put(ref.key, bytes(data))


def lose_anchor(trainer: Publisher, version: int) -> None:
    """Its record names a file that is gone."""
    record = trainer.ledger.anchor(trainer.ledger.manifest(version))
    assert record is not None
    trainer.ledger.store.delete(record.objects[0].key)


def spoil_record(trainer: Publisher, version: int) -> None:
    """Its record says that it belongs to another manifest."""
    manifest = trainer.ledger.manifest(version)
    key, record = anchor_key(version, manifest.epoch), trainer.ledger.anchor(manifest)
    assert record is not None
    trainer.ledger.store.put(key, replace(record, manifest="0" * 64).to_bytes())


def fill_wrongly(trainer: Publisher, version: int) -> None:
    """All hashes of its files are right, but they hold other weights than the record says."""
    manifest = trainer.ledger.manifest(version)
    record = trainer.ledger.anchor(manifest)
    assert record is not None
    data = bytearray(trainer.ledger.store.get(record.objects[0].key, max_bytes=1 << 20))
    data[-1] ^= 1
    trainer.writer.attach_anchor(manifest, {"model.safetensors": bytes(data)}, record.tensors)


def failures(replica: Replica) -> dict[str, int]:
    """How often what was counted."""
    return {kind: count for kind, count in replica.coordinator.status.measures.failures.items() if count}


def refused_at(replica: Replica, version: int, refused: int, good: Any) -> dict[str, Any]:
    """It serves ``version``, bit by bit, and says in every place that it would not take ``refused``."""
    status = replica.wait(f"version {version}", lambda s: s["version"] == version and s["refusal"])
    assert replica.executor.equal(good)
    assert (status["state"], status["refusal"]["version"]) == ("refused", refused)
    assert status["newest_version"] >= refused and status["lag"] >= 1
    replica.wait("the acknowledgement", lambda _: replica.ledger.acknowledgements()["r"].version == version)
    ack = replica.ledger.acknowledgements()["r"]
    assert (ack.state, ack.refused_version) == ("refused", refused)
    assert ack.error == status["refusal"]["error"]
    return status


@pytest.mark.parametrize("corrupt", ["object", "content"])
def test_a_late_replica_serves_what_comes_before_a_damaged_newest_version(
    corrupt: str, trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    trainer.origin()
    anchor(trainer, trainer.step(1))
    for seed in (2, 3, 4):
        trainer.step(seed, 0.5)
    good = bits(trainer)
    bad = trainer.step(5, corrupt=corrupt)
    replica = replica_of(other(weights)).start()
    status = refused_at(replica, 5, 6, good)
    assert status["refusal"]["kind"] == "IntegrityError"
    assert status["refusal"]["object"] == (bad.objects[0].key if corrupt == "object" else None)
    assert status["refusals"] == 1
    anchor(trainer, bad)
    status = replica.wait_version(6)
    assert (status["state"], status["refusal"], status["refusals"]) == ("live", None, 1)
    assert replica.executor.equal(trainer.weights)
    replica.wait_ack("live")
    trainer.step(6)
    replica.wait_version(7)


def test_it_goes_on_when_the_objects_come_again(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    anchor(trainer, trainer.origin())
    good = bits(trainer)
    bad = trainer.step(1, corrupt="object")
    replica = replica_of(other(weights)).start()
    refused_at(replica, 1, 2, good)
    trainer.heal(bad)
    assert replica.wait_version(2)["state"] == "live"
    assert replica.executor.equal(trainer.weights)


@pytest.mark.parametrize("bad_version", [3, 6, 9])
@pytest.mark.parametrize("corrupt", ["object", "content"])
def test_damage_in_the_middle_of_the_chain_leaves_all_before_it(
    corrupt: str, bad_version: int, trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    """A wrong digest at the end does not say which of nine versions it comes from."""
    anchor(trainer, trainer.origin())
    for version in range(2, 11):
        if version == bad_version:
            good = bits(trainer)
        trainer.step(version, 0.5, corrupt=corrupt if version == bad_version else None)
    replica = replica_of(other(weights)).start()
    replica.wait("the last before it", lambda s: s["version"] == bad_version - 1)
    refused_at(replica, bad_version - 1, bad_version if corrupt == "object" else 10, good)
    assert replica.status["refusals"] == 1


def test_a_live_replica_that_was_away_comes_as_far_as_it_can(trainer: Publisher, replica_of: Make) -> None:
    trainer.origin()
    replica = replica_of()
    turns(replica, lambda s: s["version"] == 1)
    trainer.step(1)
    trainer.step(2)
    good = bits(trainer)
    trainer.step(3, corrupt="object")
    trainer.step(4)
    turns(replica, lambda s: s["version"] == 3)
    refused_at(replica, 3, 4, good)


@pytest.mark.parametrize("damage", [spoil_anchor, lose_anchor, spoil_record, fill_wrongly])
def test_of_two_anchors_the_newer_one_may_be_damaged(
    damage: Callable[[Publisher, int], None], trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    """The older one and the deltas after it lead to the newest version all the same; what was damaged is said once."""
    anchor(trainer, trainer.origin())
    trainer.step(1)
    anchor(trainer, trainer.step(2))
    damage(trainer, 3)
    replica = replica_of(other(weights)).start()
    status = replica.wait_version(3)
    assert replica.executor.equal(trainer.weights)
    assert (status["state"], status["refusal"], status["anchors_taken"]) == ("live", None, 1)
    gone = damage is lose_anchor
    assert status["last_error"]["kind"] == ("NotFoundError" if gone else "IntegrityError")
    assert "is left out" in status["last_error"]["error"]
    assert failures(replica) == {status["last_error"]["kind"]: 1}
    trainer.step(3)
    replica.wait_version(4)
    assert replica.wait_ack("live").version in (3, 4)


def test_deltas_after_a_damaged_anchor_are_taken_after_an_older_one(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    for version in range(2, 8):
        manifest = trainer.step(version)
        if version in (3, 5):
            anchor(trainer, manifest)
    spoil_anchor(trainer, 3)
    spoil_anchor(trainer, 5)
    replica = replica_of(other(weights)).start()
    assert replica.wait_version(7)["refusals"] == 0
    assert replica.executor.equal(trainer.weights)
    assert failures(replica) == {"IntegrityError": 2}


def test_a_wrong_anchor_under_deltas_is_found_by_the_search(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    """A wrong digest at the end may be the anchor's or a delta's: only what is served in between tells."""
    anchor(trainer, trainer.origin())
    trainer.step(1)
    anchor(trainer, trainer.step(2))
    fill_wrongly(trainer, 3)
    for seed in range(3, 8):
        trainer.step(seed)
    replica = replica_of(other(weights)).start()
    status = replica.wait_version(8)
    assert (status["state"], status["refusals"]) == ("live", 1)
    assert "the anchor of version 3 is left out" in status["last_error"]["error"]
    assert replica.executor.equal(trainer.weights)


def test_no_way_around_a_damaged_anchor_is_said(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    trainer.origin()
    newest = trainer.step(1)
    anchor(trainer, newest)
    spoil_anchor(trainer, 2)
    replica = replica_of(other(weights)).start()
    refusal = replica.wait("a refusal", lambda s: s["refusal"])["refusal"]
    assert refusal["object"].startswith("anchors/000000000002-")
    assert "No other way: way to version 2" in refusal["error"] and "attach an anchor" in refusal["error"]
    assert replica.wait_ack("refused").error == refusal["error"]
    assert failures(replica) == {"IntegrityError": 1}
    anchor(trainer, newest)  # the same files again
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)


def test_a_damaged_anchor_and_a_damaged_newest_version(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    anchor(trainer, trainer.origin())
    trainer.step(1)
    anchor(trainer, trainer.step(2))
    trainer.step(3)
    good = bits(trainer)
    trainer.step(4, corrupt="object")
    spoil_anchor(trainer, 3)
    replica = replica_of(other(weights)).start()
    refused_at(replica, 4, 5, good)


def test_a_load_in_place_from_a_damaged_anchor_goes_on_with_an_older_one(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    anchor(trainer, trainer.step(1))
    spoil_anchor(trainer, 2)
    replica = replica_of(other(weights))
    too_small(replica)
    replica.start()
    assert replica.wait_version(2)["state"] == "live"
    assert replica.executor.equal(trainer.weights)
    assert not replica.pause.paused


def test_a_refused_version_is_not_taken_by_way_of_an_anchor_below_what_is_served(
    trainer: Publisher, replica_of: Make
) -> None:
    """That way comes by what is served, from where on it is the chain: nothing is read in vain, over and over."""
    anchor(trainer, trainer.origin())
    replica = replica_of()
    turns(replica, lambda s: s["version"] == 1)
    trainer.step(1)
    turns(replica, lambda s: s["version"] == 2)
    bad = trainer.step(2, corrupt="content")
    turns(replica, lambda s: s["refusal"])
    anchor(trainer, bad)
    spoil_anchor(trainer, 3)
    read: list[str] = []
    for rank in replica.executor.ranks:
        good = rank.ledger.read_object
        rank.ledger.read_object = lambda ref, good=good: read.append(ref.key) or good(ref)  # type: ignore[method-assign]
    turns(replica, lambda s: "No other way" in s["refusal"]["error"])
    assert any(key.startswith("anchors/000000000003") for key in read)
    assert not any(key.startswith("anchors/000000000001") for key in read)


def test_a_rollback_on_the_way_to_something_older_is_counted_once(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    good = bits(trainer)
    trainer.step(1, corrupt="object")
    replica = replica_of(other(weights))
    replica.executor.ranks[1].fail = {"commit"}
    replica.start()
    replica.wait("a rollback", lambda s: s["rollbacks"])
    replica.executor.ranks[1].fail = set()
    status = refused_at(replica, 1, 2, good)
    assert failures(replica) == {"IntegrityError": 1, "RolledBack": status["rollbacks"]}
    assert status["last_error"]["kind"] == "RolledBack/Injected"


def test_a_damaged_manifest_hides_no_version_before_it(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    anchor(trainer, trainer.origin())
    trainer.step(1)
    good = bits(trainer)
    manifest = trainer.step(2)
    store = trainer.ledger.store
    whole = store.get(manifest.key, max_bytes=1 << 20)
    store.put(manifest.key, whole[:-9])
    replica = replica_of(other(weights)).start()
    refused_at(replica, 2, 3, good)
    store.put(manifest.key, whole)
    assert replica.wait_version(3)["state"] == "live"
    assert replica.executor.equal(trainer.weights)


def test_a_manifest_in_the_middle_hides_no_version_before_it(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    trainer.step(1)
    good = bits(trainer)
    hidden = trainer.step(2)
    trainer.step(3)
    trainer.step(4)
    store = trainer.ledger.store
    whole = store.get(hidden.key, max_bytes=1 << 20)
    store.put(hidden.key, whole[:-9])
    replica = replica_of(other(weights)).start()
    refused_at(replica, 2, 5, good)
    store.put(hidden.key, whole)
    replica.wait_version(5)
    assert replica.executor.equal(trainer.weights)


def test_a_load_in_place_that_fails_is_followed_by_one_of_less(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    good = bits(trainer)
    bad = trainer.step(1, corrupt="content")
    replica = replica_of(other(weights))
    too_small(replica)
    replica.start()
    refused_at(replica, 1, 2, good)
    assert not replica.pause.paused
    anchor(trainer, bad)
    replica.wait_version(2)
    assert replica.executor.equal(trainer.weights)


def test_memory_that_is_poisoned_meanwhile_is_what_could_be_proven_again(
    trainer: Publisher, replica_of: Make, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    good = bits(trainer)
    trainer.step(1, corrupt="object")
    replica = replica_of(other(weights)).start()
    refused_at(replica, 1, 2, good)
    for rank in replica.executor.ranks:
        rank.live["norm"][0] ^= 1
    replica.coordinator.scan().result(10)
    refused_at(replica, 1, 2, good)
    assert replica.status["audit"]["completed"] == 1


def test_nothing_to_fall_back_to_is_searched_for_once(trainer: Publisher, replica_of: Make, weights: Any) -> None:
    """Neither the store nor the engine is kept busy while nobody heals; another anchor is another look."""
    first = trainer.origin()
    start = bits(trainer)
    trainer.step(1, corrupt="object")
    replica = replica_of(other(weights))
    turns(replica, lambda s: s["refusals"])
    searched: list[int] = []
    below = replica.ledger.newest_below
    replica.ledger.newest_below = lambda version: searched.append(version) or below(version)  # type: ignore[method-assign, func-returns-value]
    for _ in range(5):
        replica.coordinator.hint()
        replica.coordinator.turn()
    assert (replica.status["version"], searched) == (None, [])
    trainer.weights, newest = start, bits(trainer)
    anchor(trainer, first)
    turns(replica, lambda s: s["version"] == 1)
    assert replica.executor.equal(start)
    trainer.weights = newest


@pytest.mark.parametrize("follows", [False, True])
def test_damage_of_an_anchor_says_nothing_of_what_lies_between_it_and_the_live_weights(
    trainer: Publisher, replica_of: Make, weights: Any, follows: bool
) -> None:
    """An object was deleted, so an anchor is tried next: that the anchors are damaged too leaves the deltas before it.

    ``follows``: the replica serves version 1 already; else it only has its bits.
    """
    trainer.origin()
    replica = replica_of(weights)
    if follows:
        turns(replica, lambda s: s["version"] == 1)
    anchor(trainer, trainer.step(1) if follows else trainer.ledger.manifest(1))
    spoil_anchor(trainer, 2 if follows else 1)
    if not follows:
        trainer.step(1)
    trainer.step(2)
    good = bits(trainer)
    trainer.ledger.store.delete(trainer.step(3).objects[0].key)
    replica.start()
    refused_at(replica, 3, 4, good)
