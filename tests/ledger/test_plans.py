"""A replica gets from wherever it is to the newest version, and is told when it cannot."""

from __future__ import annotations

import pickle

import pytest
from tiny_run import changed, first_bits, states

from delta_sync import ChainError, state_digest
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.plan import Position
from delta_sync.store.keys import anchor_key
from delta_sync.way_back import plan_back


def position(manifest):
    return Position(manifest.version, manifest.sha256)


def test_an_empty_store_has_no_version_and_no_plan(store):
    assert Ledger(store).head() is None
    assert Ledger(store).plan(None, None) is None


def test_one_behind_takes_one_delta(run):
    before = run.origin()
    after = run.delta()
    plan = Ledger(run.store).plan(position(before), None)
    assert (plan.start, plan.anchor, plan.deltas) == ("position", None, (after,))
    run.check(plan, run.bits[before.sha256])
    assert Ledger(run.store).plan(plan.position, None) is None


def test_a_late_replica_starts_at_the_newest_anchor(run, tmp_path):
    run.origin()
    run.anchor(tmp_path / "a")
    run.delta()
    anchored = run.delta()
    run.anchor(tmp_path / "b")
    last = [run.delta() for _ in range(3)]
    plan = Ledger(run.store).plan(None, None)
    assert (plan.start, plan.anchor.version, list(plan.deltas)) == ("anchor", anchored.version, last)
    run.check(plan, None)


def test_live_bits_start_where_their_digest_is(run):
    origin = run.origin()
    later = [run.delta() for _ in range(4)]
    plan = Ledger(run.store).plan(None, origin.state_digest)
    assert (plan.start, list(plan.deltas)) == ("live", later)
    run.check(plan, first_bits())


def test_live_bits_of_the_newest_version_need_nothing(run):
    run.origin()
    newest = run.delta()
    plan = Ledger(run.store).plan(None, newest.state_digest)
    assert (plan.start, plan.deltas, dict(plan.tensors)) == ("live", (), {})


def test_no_start_says_what_to_do(run):
    run.origin()
    run.delta()
    with pytest.raises(ChainError, match="attach an anchor"):
        Ledger(run.store).plan(None, state_digest(states(first_bits(seed=9))))


def test_an_anchor_can_be_preferred(run, tmp_path):
    run.origin()
    run.anchor(tmp_path)
    newest = run.delta()
    plan = Ledger(run.store).plan(position(newest), newest.state_digest, prefer_anchor=True)
    assert plan.start == "anchor"
    run.check(plan, None)


def test_without_an_anchor_the_one_before_it_is_the_start(run, tmp_path):
    first = run.origin()
    run.anchor(tmp_path / "a")
    second = run.delta()
    run.anchor(tmp_path / "b")
    last = run.delta()
    ledger = Ledger(run.store)
    newer, older = (AnchorRef(manifest.version, manifest.epoch) for manifest in (second, first))
    assert ledger.plan(None, None).anchor.version == newer.version
    plan = ledger.plan(None, None, without={newer})
    assert (plan.anchor.version, list(plan.deltas), plan.damaged) == (older.version, [second, last], ())
    run.check(plan, None)
    with pytest.raises(ChainError, match="attach an anchor"):
        ledger.plan(None, None, without={newer, older})
    key = anchor_key(newer.version, newer.epoch)
    run.store.put(key, run.store.get(key, max_bytes=1 << 20)[:-9])
    plan = ledger.plan(None, None)
    assert (plan.anchor.version, len(plan.damaged)) == (older.version, 1)
    assert str(pickle.loads(pickle.dumps(plan)).damaged[0]) == str(plan.damaged[0])


def test_a_plan_travels_between_processes(run, tmp_path):
    run.origin()
    run.anchor(tmp_path)
    run.delta()
    plan = Ledger(run.store).plan(None, None)
    assert pickle.loads(pickle.dumps(plan)) == plan


def test_the_way_back_names_every_tensor_it_touches_with_its_older_state(run):
    older = [run.origin(), run.delta()]
    newer = [run.delta() for _ in range(5)]
    for target, between in ((older[1], newer), (older[0], [older[1], *newer])):
        plan = plan_back(Ledger(run.store), target, position(newer[-1]))
        assert (plan.start, plan.target, list(plan.deltas)) == ("back", target, between)
        touched = {name for manifest in between for name in manifest.tensors}
        every = states(run.bits[target.sha256])
        assert dict(plan.tensors) == {name: every[name] for name in touched}


def test_no_way_back_over_the_start_of_a_chain(run):
    first = run.origin()
    run.origin(changed(run.now, 99))
    newest = run.delta()
    with pytest.raises(ChainError, match="starts a chain"):
        plan_back(Ledger(run.store), first, position(newest))


def test_a_way_back_leads_over_a_trainer_that_resumed_exactly(run):
    older = [run.origin(), run.delta()]
    run.origin()
    newer = run.delta()
    for target, between in ((older[1], [newer]), (older[0], [older[1], newer])):
        plan = plan_back(Ledger(run.store), target, position(newer))
        assert (plan.start, plan.target, list(plan.deltas)) == ("back", target, between)
        every = states(run.bits[target.sha256])
        assert dict(plan.tensors) == {name: every[name] for m in between for name in m.tensors}


def test_where_no_way_leads_to_an_older_version_the_remedy_is_about_that_one(run):
    older = run.origin()
    run.origin(changed(run.now, 99))
    with pytest.raises(ChainError, match="attach an anchor to version 1 or to one before it"):
        Ledger(run.store).plan(None, None, target=older)
