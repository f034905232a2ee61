"""What a coordinator counts and acknowledges while it takes, refuses, rolls back and audits versions."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
from test_coordinator import anchor, replica_of, trainer, uri, weights  # noqa: F401 (fixtures)

from delta_sync.errors import StoreError
from vllm_delta_plugin.log import logger


def measures(replica: Any) -> dict[str, Any]:
    return replica.coordinator.status.measures.to_dict()


def failures(replica: Any) -> dict[str, int]:
    return {kind: count for kind, count in measures(replica)["failures"].items() if count}


def acknowledged(replica: Any, version: int) -> Any:
    """What the bucket says of it; soon, as clients come first."""
    deadline = time.monotonic() + 60
    while (ack := replica.ledger.acknowledgements().get("r")) is None or ack.version != version:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return ack


def test_a_commits_numbers_are_in_the_acknowledgement_and_counted(trainer: Any, replica_of: Any) -> None:  # noqa: F811
    replica = replica_of().start()
    trainer.origin()
    replica.wait_version(1)
    adopted = acknowledged(replica, 1).performance
    assert adopted.keys() == {"noticed_seconds", "served_seconds"}
    trainer.step(0)
    replica.wait_version(2)
    numbers = acknowledged(replica, 2).performance
    assert numbers.keys() == {
        "noticed_seconds", "stage_seconds", "commit_seconds", "served_seconds", "fetched_bytes",
    }, "nothing is generated, so there is no gap"  # fmt: skip
    assert 0 < numbers["commit_seconds"] < numbers["served_seconds"]
    assert replica.status["performance"] == numbers
    counted = measures(replica)
    assert sum(counted["histograms"]["commit_seconds"]["counts"]) == 1
    assert sum(counted["histograms"]["noticed_seconds"]["counts"]) == 2
    assert counted["histograms"]["commit_seconds"]["sum"] == numbers["commit_seconds"]
    assert counted["changed_elements"] > 0
    assert failures(replica) == {}


def test_outputs_around_a_commit_give_the_gap(trainer: Any, replica_of: Any) -> None:  # noqa: F811
    replica = replica_of().start()
    trainer.origin()
    replica.wait_version(1)
    clock = replica.live.outputs
    replica.main.run(lambda: clock.returned(True))
    version = trainer.step(1).version
    replica.wait_version(version)
    assert replica.status["version"] == version, "served before the outputs that are waited for"
    for _ in range(2):
        replica.main.run(lambda: clock.returned(True))
    assert acknowledged(replica, version).performance["gap_seconds"] > 0


def test_proof_commit_and_what_is_said_of_it_are_steps_apart(trainer: Any, replica_of: Any, monkeypatch: Any) -> None:  # noqa: F811
    """Each takes the interpreter from the engine; together they would all delay the same tokens."""
    replica = replica_of().start()
    trainer.origin()
    replica.wait_version(1)
    order: list[str] = []
    commit, log = replica.live._commit, logger.info

    def on_the_engines_thread(*args: Any) -> Any:
        committed = commit(*args)
        order.append(f"status says {replica.status['version']}, committed at {replica.status['committed_at_last']}")
        assert committed.at <= time.time()
        order.append(f"committed at {committed.at}")
        return committed

    monkeypatch.setattr(replica.live, "_commit", on_the_engines_thread)
    monkeypatch.setattr(replica.live.outputs, "rest", lambda: order.append("rest"))
    monkeypatch.setattr(logger, "info", lambda text, *args: (order.append("log"), log(text, *args)))
    replica.executor.before = lambda name: order.append(name)
    trainer.step(0)
    replica.wait("the line in the log", lambda _: "log" in order)
    at = next(line for line in order if line.startswith("committed at"))
    assert [line for line in order if line != "stage_poll"][:8] == [
        "stage_begin", "rest", "commit", "settle", f"status says 2, {at}", at, "rest", "log",
    ], "status and tokens change together"  # fmt: skip


def test_failures_are_counted_once_by_their_kind(trainer: Any, replica_of: Any, weights: Any) -> None:  # noqa: F811
    replica = replica_of(poll=0.01).start()
    trainer.origin()
    replica.wait_version(1)
    bad = trainer.step(1, corrupt="content")
    replica.wait("a refusal", lambda s: s["refusal"])
    assert replica.status["lag_seconds"] > 0
    time.sleep(1.5)  # tried again meanwhile
    assert failures(replica) == {"IntegrityError": 1}
    anchor(trainer, bad)
    replica.wait_version(2)
    assert acknowledged(replica, 2).performance["served_seconds"] > 1.5
    assert replica.status["lag_seconds"] == 0
    replica.executor.ranks[1].fail = {"commit"}
    trainer.step(2)
    replica.wait("a rollback", lambda s: s["rollbacks"])
    replica.executor.ranks[1].fail = set()
    replica.wait_version(3)
    assert failures(replica)["RolledBack"] >= 1
    before = measures(replica)["audits"]
    replica.executor.ranks[0].live["w"] ^= np.uint16(1)
    replica.coordinator.scan()
    # Not until it is poisoned: an anchor is there, which heals it in a moment.
    replica.wait("what it found", lambda _: measures(replica)["audits"]["failed"] == before["failed"] + 1)
    replica.wait("its kind", lambda _: failures(replica)["IntegrityError"] == 2)


def test_a_rank_without_the_store_is_counted_as_that(trainer: Any, replica_of: Any, monkeypatch: Any) -> None:  # noqa: F811
    replica = replica_of().start()
    trainer.origin()
    replica.wait_version(1)
    ledger, calls = replica.executor.ranks[0].ledger, []
    read = ledger.read_object

    def once(ref: Any) -> bytes:
        calls.append(ref.key)
        if len(calls) == 1:
            raise StoreError("the store", expected="an answer", got="none")
        return read(ref)

    monkeypatch.setattr(ledger, "read_object", once)
    trainer.step(0)
    replica.wait_version(2)
    assert failures(replica) == {"StoreError": 1}
