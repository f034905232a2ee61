"""Folds: several deltas as one, attached to a version; taken where they are smaller, proven like any chain."""

from __future__ import annotations

import pickle
from dataclasses import replace

import numpy as np
import pytest
from tiny_run import BF16, commit_delta, first_bits, states

from delta_sync.delta import diff, fold
from delta_sync.delta_file import decode_delta
from delta_sync.errors import ChainError, FormatError, IntegrityError
from delta_sync.fold_writer import attach_fold
from delta_sync.ledger import Ledger
from delta_sync.manifest import FoldRecord, Manifest
from delta_sync.plan import Position
from delta_sync.store.keys import fold_key


def chain_of(run, count):
    """An origin and so many deltas."""
    return [run.origin(), *(run.delta() for _ in range(count))]


def attach(run, base: Manifest, path: list[Manifest]) -> FoldRecord:
    """The fold of ``path``, made from nothing but its delta objects."""
    folded, after = {}, {}
    for manifest in path:
        for ref in manifest.objects:
            for delta in decode_delta(Ledger(run.store).read_object(ref))[1]:
                folded[delta.name] = fold([*folded.get(delta.name, ()), delta])
        after |= manifest.tensors
    return attach_fold(run.store, base, path[-1], [d for deltas in folded.values() for d in deltas], after)


def at(manifest: Manifest) -> Position:
    return Position(manifest.version, manifest.sha256)


def steps(plan) -> list[tuple[int, int]]:
    return [(step.base_version, step.version) for step in plan.deltas]


def test_a_reader_several_behind_takes_a_fold_and_proves_it(run):
    versions = chain_of(run, 5)
    attach(run, versions[1], versions[2:5])
    plan = Ledger(run.store).plan(at(versions[0]), None)
    assert steps(plan) == [(1, 2), (2, 5), (5, 6)]
    run.check(pickle.loads(pickle.dumps(plan)), run.bits[versions[0].sha256])
    assert steps(Ledger(run.store).plan(at(versions[0]), None, use_folds=False)) == [(v, v + 1) for v in range(1, 6)]
    one_behind = Ledger(run.store).plan(at(versions[4]), None)
    assert steps(one_behind) == [(5, 6)]


def test_the_fewest_bytes_win_and_a_fold_that_is_no_smaller_is_not_taken(run):
    versions = chain_of(run, 6)
    attach(run, versions[0], versions[1:2])  # of one delta: as large as that
    attach(run, versions[1], versions[2:4])
    attach(run, versions[3], versions[4:6])
    attach(run, versions[2], versions[3:6])
    plan = Ledger(run.store).plan(at(versions[0]), None)
    sizes = [sum(ref.size for ref in step.objects) for step in plan.deltas]
    assert steps(plan) in ([(1, 2), (2, 4), (4, 6), (6, 7)], [(1, 2), (2, 3), (3, 6), (6, 7)])
    ways = [
        [versions[1], *(Ledger(run.store).fold(versions[t], b) for b, t in pairs), versions[6]]
        for pairs in ([(2, 3), (4, 5)], [(3, 5)])
    ]
    ways[1].insert(1, versions[2])
    assert sum(sizes) == min(sum(ref.size for step in way for ref in step.objects) for way in ways)
    run.check(plan, run.bits[versions[0].sha256])


def test_it_leads_on_from_an_anchor(run, tmp_path):
    versions = chain_of(run, 4)
    run.anchor(tmp_path, versions[1])
    attach(run, versions[1], versions[2:])
    plan = Ledger(run.store).plan(None, None)
    assert (plan.start, plan.anchor.version, steps(plan)) == ("anchor", 2, [(2, 5)])
    run.check(plan, None)


def test_it_leads_on_where_what_it_covers_is_gone(run):
    """Manifests and deltas below version 4 were deleted; a replica that still is at version 1 needs no anchor."""
    versions = chain_of(run, 5)
    attach(run, versions[0], versions[1:4])
    for manifest in versions[:3]:
        run.store.delete(manifest.key)
        for ref in manifest.objects:
            run.store.delete(ref.key)
    plan = Ledger(run.store).plan(at(versions[0]), None)
    assert (plan.start, steps(plan)) == ("position", [(1, 4), (4, 5), (5, 6)])
    run.check(plan, run.bits[versions[0].sha256])
    with pytest.raises(ChainError):
        Ledger(run.store).plan(at(versions[1]), None)  # the fold does not begin there
    assert steps(Ledger(run.store).plan(at(versions[2]), None)) == [(3, 4), (4, 5), (5, 6)]  # its child's parent


def test_steps_that_cancel_leave_an_empty_fold(run):
    """The embedding goes up and comes back: the fold is nothing to fetch."""
    first = run.origin()
    there = {**run.now, "norm.weight": run.now["norm.weight"] + np.uint16(1)}
    up = commit_delta(run.writer, run.now, there, 1)
    down = commit_delta(run.writer, there, run.now, 2)
    run.bits |= {up.sha256: there, down.sha256: run.now}
    assert attach(run, first, [up, down]).objects == ()
    plan = Ledger(run.store).plan(at(first), None)
    assert steps(plan) == [(1, 3)]
    run.check(plan, run.bits[first.sha256])


def test_a_new_epochs_origin_of_other_bits_is_never_crossed(run):
    versions = chain_of(run, 2)
    run.writer = type(run.writer).open(Ledger(run.store))
    origin = run.origin(first_bits(seed=9))
    run.delta()
    with pytest.raises(ChainError):
        Ledger(run.store).plan(at(versions[2]), None)
    assert origin.parent == versions[2].sha256


@pytest.mark.parametrize("wrong", ["bytes", "manifest", "state_digest", "run"])
def test_a_damaged_record_is_as_good_as_none(run, wrong, caplog):
    versions = chain_of(run, 3)
    record = attach(run, versions[0], versions[1:])
    key = fold_key(4, 1, 1)
    other = "other" if wrong == "run" else "0" * 64
    run.store.put(key, b"{" if wrong == "bytes" else replace(record, **{wrong: other}).to_bytes())
    plan = Ledger(run.store).plan(at(versions[0]), None)
    assert steps(plan) == [(1, 2), (2, 3), (3, 4)] and "left out the fold from" in caplog.text
    run.check(plan, run.bits[versions[0].sha256])


def test_a_fold_of_other_bits_does_not_pass_the_proof(run):
    versions = chain_of(run, 3)
    wrong = diff("norm.weight", BF16, (4,), np.zeros(4, np.uint16), np.arange(4, dtype=np.uint16))
    attach_fold(run.store, versions[0], versions[3], [wrong], {"norm.weight": states(run.now)["norm.weight"]})
    plan = Ledger(run.store).plan(at(versions[0]), None)
    assert steps(plan) == [(1, 4)]
    with pytest.raises(AssertionError):
        run.check(plan, run.bits[versions[0].sha256])


def test_a_fold_lies_in_its_own_folder_and_goes_forward(run):
    versions = chain_of(run, 2)
    record = attach(run, versions[0], versions[1:])
    assert FoldRecord.from_bytes(record.to_bytes()) == record
    for bad in (
        replace(record, objects=(replace(record.objects[0], key="deltas/x.safetensors"),)),
        replace(record, base_version=3),
        replace(record, codec="two words"),
    ):
        with pytest.raises(FormatError):
            bad.to_bytes()
    with pytest.raises(ChainError, match="a base before"):
        attach_fold(run.store, versions[2], versions[0], [], {})
    run.store.put(record.objects[0].key, b"other")
    with pytest.raises(IntegrityError):
        Ledger(run.store).read_object(record.objects[0])
