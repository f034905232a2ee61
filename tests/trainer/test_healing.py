"""Which remedy a refusing replica gets, and when."""

from __future__ import annotations

from dataclasses import replace

from trl_callback.healing import MAX_ANCHORS, Healer, Refusal


def refusal(version: int = 5, **fields: object) -> Refusal:
    return Refusal("one", version, **{"kind": "IntegrityError", "error": "sha256", "served": 4, **fields})  # type: ignore[arg-type]


def decide(healer: Healer, seen: Refusal, now: float, *, republishable: bool = True) -> str | None:
    """Decide and, if anything is due, apply it."""
    remedy = healer.remedy(seen, republishable=republishable, now=now)
    if remedy is not None:
        healer.applied(seen, remedy, now=now)
    return remedy


def test_objects_first_then_weights_a_few_times_then_nothing() -> None:
    healer = Healer(grace=10)
    assert decide(healer, refusal(), 0) == "republish"
    assert decide(healer, refusal(), 9.9) is None
    times = [10.1 + 10.1 * k for k in range(MAX_ANCHORS + 2)]
    assert [decide(healer, refusal(), t) for t in times] == ["anchor"] * MAX_ANCHORS + [None, None]


def test_weights_at_once_where_the_objects_are_gone_or_no_way_leads_to_the_newest_version() -> None:
    assert decide(Healer(grace=10), refusal(), 0, republishable=False) == "anchor"
    assert decide(Healer(grace=10), refusal(kind="ChainError"), 0) == "anchor"


def test_a_replica_that_counts_another_refusal_is_not_kept_waiting() -> None:
    healer = Healer(grace=1000)
    assert decide(healer, refusal(attempts=3), 0) == "republish"
    assert decide(healer, refusal(attempts=3), 1) is None
    assert decide(healer, refusal(attempts=4), 2) == "anchor"


def test_a_slow_replica_gets_the_time_of_its_stagings() -> None:
    healer = Healer(grace=1)
    decide(healer, refusal(stage_seconds=30), 0)
    assert decide(healer, refusal(stage_seconds=30), 60) is None
    assert decide(healer, refusal(stage_seconds=30), 61.1) == "anchor"


def test_newer_versions_refused_for_the_same_reason_are_the_same_case() -> None:
    healer = Healer(grace=10)
    assert decide(healer, refusal(5), 0) == "republish"
    assert decide(healer, refusal(6), 5) is None
    assert decide(healer, refusal(7), 10.1) == "anchor"


def test_a_replica_that_went_on_starts_a_new_case() -> None:
    healer = Healer(grace=10)
    decide(healer, refusal(5), 0)
    assert decide(healer, refusal(6, served=5), 1) == "republish"
    healer.recovered("one")
    assert decide(healer, refusal(6, served=5), 2) == "republish"


def test_weights_that_just_arrived_for_another_reason_are_not_sent_twice() -> None:
    healer = Healer(grace=10)
    healer.anchored(5, 0)
    assert decide(healer, refusal(kind="ChainError"), 1) is None
    assert decide(healer, refusal(kind="ChainError"), 10.1) == "anchor"


def test_an_anchor_of_an_older_version_keeps_nobody_waiting_whom_it_does_not_help() -> None:
    healer = Healer(grace=10)
    healer.anchored(4, 0)
    assert healer.remedy(refusal(5), republishable=False, now=1) == "anchor"
    assert healer.remedy(refusal(5, kind="ChainError"), republishable=False, now=1) is None
    healer.anchored(5, 1)
    assert healer.remedy(refusal(5), republishable=False, now=2) is None


def test_replicas_are_judged_apart() -> None:
    healer = Healer(grace=10)
    decide(healer, refusal(), 0)
    other = Refusal("two", 5, "IntegrityError", "sha256", 4)
    assert decide(healer, other, 1) == "republish"


def of(replica: str, **fields: object) -> Refusal:
    return replace(refusal(**fields), replica=replica)


def decide_in_turn(healer: Healer, seen: list[Refusal], *, republishable: bool, now: float) -> list[str | None]:
    """As the publisher does: it notes an anchor before the remedy."""
    remedies = []
    for one in seen:
        remedies.append(healer.remedy(one, republishable=republishable, now=now))
        if remedies[-1] == "anchor":
            healer.anchored(one.version, now)
        if remedies[-1] is not None:
            healer.applied(one, remedies[-1], now=now)  # type: ignore[arg-type]
    return remedies


def test_several_replicas_with_one_trouble_get_one_anchor() -> None:
    healer = Healer(grace=10)
    fleet = ["one", "two", "three"]
    once = [of(name) for name in fleet]
    assert decide_in_turn(healer, once, republishable=False, now=0) == ["anchor", None, None]
    assert decide_in_turn(healer, once, republishable=False, now=9.9) == [None, None, None]
    assert decide_in_turn(healer, once[1:], republishable=False, now=10.1) == ["anchor", None]


def test_several_replicas_that_count_on_get_one_anchor_after_the_objects() -> None:
    healer = Healer(grace=10)
    fleet = ["one", "two", "three"]
    first = [of(name, attempts=1) for name in fleet]
    assert decide_in_turn(healer, first, republishable=True, now=0) == ["republish"] * 3
    again = [of(name, attempts=2) for name in fleet]
    assert decide_in_turn(healer, again, republishable=True, now=1) == ["anchor", None, None]
    assert decide_in_turn(healer, [of("one", attempts=3)], republishable=True, now=2) == ["anchor"], "it had that one"
