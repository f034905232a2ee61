"""Versions that are LoRA adapters, over two in-memory ranks: taken, taken back, ended, and refused without LoRA."""

# ruff: noqa: F811
from __future__ import annotations

from typing import Any

import pytest
from engine_fakes import Rank
from helpers.publish import Publisher
from test_control import order
from test_coordinator import Replica, anchor, other, replica_of, trainer, uri, weights  # noqa: F401

LORA = {"max_rank": 8, "dtype": "BF16", "modules": ["w"]}


@pytest.fixture
def with_lora(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rank, "lora", LORA)


def loaded(replica: Replica) -> set[str | None]:
    return {rank.adapter for rank in replica.executor.ranks}


def test_adapters_follow_each_other_and_the_weights_stay(
    with_lora: None, trainer: Publisher, replica_of: Any, weights: Any
) -> None:
    trainer.origin()
    replica = replica_of().start()
    assert replica.wait_version(1)["adapter"] is None
    for seed in range(3):
        newest = trainer.adapter(seed)
        status = replica.wait_version(newest.version)
        assert loaded(replica) == {newest.objects[0].sha256} == {status["adapter"]}
    assert replica.executor.equal(weights)
    assert (status["commits"], status["anchors_taken"], status["commit_generation"]) == (3, 0, 3)
    assert set(replica.coordinator.tensors()["adapter"]) == set(newest.tensors)
    acks = replica.ledger.acknowledgements
    replica.wait("its acknowledgement", lambda _: [ack.manifest for ack in acks().values()] == [newest.sha256])


def test_a_late_replica_takes_the_last_alone(
    with_lora: None, trainer: Publisher, replica_of: Any, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    for seed in range(3):
        newest = trainer.adapter(seed)
    same, another = replica_of().start(), replica_of(other(weights)).start()
    for replica, anchors in ((same, 0), (another, 1)):
        status = replica.wait_version(4)
        assert (status["commits"], status["anchors_taken"]) == (1, anchors)
        assert loaded(replica) == {newest.objects[0].sha256}
        assert replica.executor.equal(weights)


def test_a_rollback_goes_to_an_older_adapter_and_on_again(with_lora: None, trainer: Publisher, replica_of: Any) -> None:
    trainer.origin()
    replica = replica_of().start()
    versions = [trainer.adapter(seed) for seed in range(3)]
    replica.wait_version(4)
    assert order(replica, "rollback", 2)["ok"]
    assert loaded(replica) == {versions[0].objects[0].sha256}
    assert order(replica, "unpin")["ok"]
    replica.wait_version(4)
    assert loaded(replica) == {versions[2].objects[0].sha256}


def test_weights_after_an_adapter_end_it(with_lora: None, trainer: Publisher, replica_of: Any) -> None:
    trainer.origin()
    replica = replica_of().start()
    trainer.adapter(1)
    replica.wait_version(2)
    trainer.step(1, 0.3)
    assert replica.wait_version(3)["adapter"] is None
    assert loaded(replica) == {None}
    assert replica.executor.equal(trainer.weights)


def test_a_load_in_place_ends_with_the_adapter(
    with_lora: None, trainer: Publisher, replica_of: Any, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    newest = trainer.adapter(1)
    replica = replica_of(other(weights))
    for rank in replica.executor.ranks:
        rank.too_small = True
    replica.start()
    status = replica.wait_version(2)
    assert (status["state"], status["adapter"]) == ("live", newest.objects[0].sha256)
    assert loaded(replica) == {newest.objects[0].sha256}
    assert replica.executor.equal(weights)


def test_a_rank_that_fails_takes_all_back_to_the_old_adapter(
    with_lora: None, trainer: Publisher, replica_of: Any
) -> None:
    trainer.origin()
    replica = replica_of().start()
    first = trainer.adapter(1)
    replica.wait_version(2)
    replica.executor.ranks[1].fail.add("commit")
    trainer.adapter(2)
    replica.wait("a rollback", lambda s: s["rollbacks"])
    assert loaded(replica) == {first.objects[0].sha256}
    replica.executor.ranks[1].fail.clear()
    replica.wait_version(3)


def test_a_rank_that_fails_after_a_load_in_place_is_reported_and_loaded_again(
    with_lora: None, trainer: Publisher, replica_of: Any, weights: Any
) -> None:
    anchor(trainer, trainer.origin())
    newest = trainer.adapter(1)
    replica = replica_of(other(weights))
    for rank in replica.executor.ranks:
        rank.too_small = True
    replica.executor.ranks[1].fail.add("commit")
    replica.start()
    status = replica.wait("a rollback", lambda s: s["rollbacks"])
    assert (status["state"], status["last_error"]["kind"]) == ("poisoned", "RolledBack/Injected")
    assert replica.pause.paused
    replica.executor.ranks[1].fail.clear()
    status = replica.wait_version(2)
    assert loaded(replica) == {newest.objects[0].sha256} == {status["adapter"]}
    assert replica.coordinator.status.measures.failures["RolledBack"] == status["rollbacks"]
    assert not replica.pause.paused


def test_without_lora_an_adapter_is_refused_by_name_and_weights_lead_past_it(
    trainer: Publisher, replica_of: Any, weights: Any
) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    trainer.adapter(1)
    status = replica.wait("a refusal", lambda s: s["refusal"])
    assert (status["state"], status["version"], status["refusal"]["kind"]) == ("refused", 1, "MappingError")
    assert "--enable-lora" in status["refusal"]["error"] and 'lora="merged"' in status["refusal"]["error"]
    assert replica.executor.equal(weights)
    trainer.step(1, 0.3)
    assert replica.wait_version(3)["state"] == "live"
    assert replica.executor.equal(trainer.weights)


def test_which_prompts_stay_cached(with_lora: None, trainer: Publisher, replica_of: Any) -> None:
    trainer.origin()
    replica = replica_of().start()
    replica.wait_version(1)
    open_before = replica.salt.current()
    trainer.prompt_cache = "all"
    trainer.adapter(1)
    replica.wait_version(2)
    assert replica.salt.current() == open_before
    trainer.prompt_cache = "none"
    trainer.adapter(2)
    replica.wait_version(3)
    assert replica.salt.current() != open_before
