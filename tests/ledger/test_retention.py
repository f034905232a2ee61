"""Retention: what goes, what stays and why; readers in every place go on, whatever moment it is interrupted at."""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import replace

import pytest
from faulty_store import Died, FaultyStore
from tiny_run import TinyRun, first_bits

from delta_sync.ack import Ack
from delta_sync.errors import ChainError, NotFoundError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.plan import Position
from delta_sync.retention import READER_SECONDS, delete, find_trim
from delta_sync.store import LocalStore, open_store
from delta_sync.store.keys import anchor_folder, anchor_key, delta_key
from delta_sync.store.memory import MemoryStore

GRACE = 100.0


def later(seconds=2 * GRACE):
    """A moment at which what was written just now is older than the grace."""
    return time.time() + seconds


def trimmed(store, keep=1, **options):
    trim = find_trim(Ledger(store), keep, GRACE, **{"now": later(), **options})
    delete(store, trim.keys)
    return trim


def keys(store):
    return {info.key for info in store.list("")}


def acknowledge(store, manifest, when=0.0, replica="one"):
    nothing = dict.fromkeys(("refused_version", "refused_object", "error_kind", "error"))
    about = {"version": manifest.version, "manifest": manifest.sha256, "epoch": manifest.epoch}
    Ledger(store).acknowledge(Ack(replica, **about, state="live", time=time.time() + when, **nothing))


def grow(run, tmp_path, versions=9, every=3):
    """An origin and deltas, with an anchor at versions 1, 4, 7, …"""
    made = [run.origin()]
    run.anchor(tmp_path / "1")
    for version in range(2, versions + 1):
        made.append(run.delta())
        if version % every == 1:
            run.anchor(tmp_path / str(version))
    return made


def at(manifest):
    return Position(manifest.version, manifest.sha256)


def test_the_newest_anchors_stay_with_all_from_the_oldest_of_them_on(run, tmp_path):
    versions = grow(run, tmp_path)
    before = keys(run.store)
    trim = trimmed(run.store, keep=2)
    assert (trim.first_kept, trim.orphans) == (4, 0)
    gone = before - keys(run.store)
    assert gone == set(trim.keys)
    assert gone == {m.key for m in versions[:3]} | {ref.key for m in versions[:3] for ref in m.objects} | {
        key for key in before if key.startswith(anchor_folder(1, 1))
    }
    assert [ref.version for ref in Ledger(run.store).anchors()] == [4, 7]
    assert trimmed(run.store, keep=2).keys == ()
    fresh = Ledger(run.store)
    assert fresh.plan(None, None).anchor.version == 7
    run.check(fresh.plan(None, None), None)
    run.check(fresh.plan(at(versions[3]), None), run.bits[versions[3].sha256])


def test_manifests_go_first_oldest_first_and_records_before_data(run, tmp_path):
    grow(run, tmp_path)
    order = [key.partition("/")[0] + "/" * key.endswith(".json") for key in find_trim(Ledger(run.store), 1, 0.0).keys]
    assert [key for key in order if key == "manifests/"] == order[:6]
    trim = find_trim(Ledger(run.store), 1, 0.0)
    assert list(trim.keys[:6]) == sorted(trim.keys[:6])
    assert [key.endswith("anchor.json") for key in trim.keys[6:8]] == [True, True]
    assert not any(key.endswith("anchor.json") for key in trim.keys[8:])


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_interrupted_anywhere_it_leaves_a_run_that_every_reader_can_follow(memory, tmp_path, keep):
    for call in range(60):
        memory.clear()
        faulty = FaultyStore(memory)
        run = TinyRun(faulty)
        versions = grow(run, tmp_path / str(call))
        trim = find_trim(Ledger(memory), keep, GRACE, now=later())
        faulty.arm(call, "die after")
        with contextlib.suppress(Died):
            delete(faulty, trim.keys)
        run.store, ledger = memory, Ledger(memory)
        run.check(ledger.plan(None, None), None)
        for manifest in versions[trim.first_kept - 1 if trim.first_kept else 0 : -1]:
            run.check(Ledger(memory).plan(at(manifest), None), run.bits[manifest.sha256])
        if faulty.fault is not None:
            break
        again = find_trim(Ledger(memory), keep, GRACE, now=later())
        assert set(again.keys) <= set(trim.keys)
        delete(memory, again.keys)
        assert not set(trim.keys) & keys(memory)
    assert faulty.fault is not None, "more calls than expected"


def test_what_became_superfluous_just_now_stays_for_the_grace(run, tmp_path):
    grow(run, tmp_path)
    trim = find_trim(Ledger(run.store), 1, GRACE)
    assert (trim.keys, trim.first_kept) == ((), None) and "anchors there: 3" in trim.held_by
    assert find_trim(Ledger(run.store), 4, GRACE, now=later()).first_kept is None
    assert find_trim(Ledger(run.store), 3, GRACE, now=later()).first_kept == 1


def test_a_replica_that_was_heard_of_keeps_what_it_needs(run, tmp_path):
    versions = grow(run, tmp_path)
    acknowledge(run.store, versions[4])
    acknowledge(run.store, versions[1], -READER_SECONDS, replica="long-gone")
    acknowledge(run.store, versions[1], 2 * READER_SECONDS, replica="from-the-future")
    acknowledge(run.store, versions[8], replica="newest")
    trim = trimmed(run.store)
    assert trim.first_kept == 5 and "replica one, which serves version 5" in trim.held_by
    run.check(Ledger(run.store).plan(at(versions[4]), None), run.bits[versions[4].sha256])
    late = Ledger(run.store).plan(at(versions[1]), None)
    assert (late.start, late.anchor.version) == ("anchor", 7)
    run.check(late, None)


def test_a_reader_on_its_way_meets_a_deleted_object_and_takes_an_anchor(run, tmp_path):
    versions = grow(run, tmp_path)
    reader = Ledger(run.store)
    for manifest in versions[:-1]:
        reader.manifest(manifest.version, manifest.sha256)  # it has read them before
    plan = reader.plan(at(versions[0]), None)
    anchor_plan = Ledger(run.store).plan(None, None)
    assert plan.start == "position"
    trimmed(run.store)
    with pytest.raises(NotFoundError):
        run.check(plan, run.bits[versions[0].sha256])
    run.check(reader.plan(at(versions[0]), None, prefer_anchor=True), None)
    run.check(anchor_plan, None)


def test_orphans_go_once_they_are_old_and_nothing_in_progress_does(run, tmp_path):
    versions = grow(run, tmp_path)
    store = run.store
    store.put(delta_key(8, 1, "a" * 64), b"another try")
    store.put(delta_key(8, 2, "b" * 64), b"of a writer that was taken over before its manifest")
    store.put(delta_key(10, 1, "c" * 64), b"a commit in progress")
    store.put(anchor_folder(5, 1) + "model.safetensors", b"given up")
    store.put(anchor_folder(9, 1) + "model.safetensors", b"in progress")
    store.put("anchors/notes.txt", b"somebody's")
    assert find_trim(Ledger(store), 3, GRACE).orphans == 0
    trim = find_trim(Ledger(store), 3, GRACE, now=later())
    assert set(trim.keys) == {
        delta_key(8, 1, "a" * 64), delta_key(8, 2, "b" * 64), anchor_folder(5, 1) + "model.safetensors"
    }  # fmt: skip
    assert (trim.first_kept, trim.orphans) == (1, 3)
    delete(store, trim.keys)
    run.check(Ledger(store).plan(at(versions[0]), None), run.bits[versions[0].sha256])


def test_a_damaged_anchor_does_not_count(run, tmp_path, caplog):
    grow(run, tmp_path)
    run.store.put(anchor_folder(7, 1) + "anchor.json", b"{")
    assert trimmed(run.store).first_kept == 4 and "does not count" in caplog.text
    run.check(Ledger(run.store).plan(None, None), None)


@pytest.mark.parametrize("left", [None, b"cut short"])
def test_an_anchor_whose_files_are_not_all_there_does_not_count(run, tmp_path, caplog, left):
    """Else the last one that a reader can start from would be deleted for it."""
    grow(run, tmp_path)
    run.store.delete(key := anchor_folder(7, 1) + "model.safetensors")
    if left is not None:
        run.store.put(key, left)
    assert trimmed(run.store).first_kept == 4 and "does not count" in caplog.text
    assert AnchorRef(4, 1) in Ledger(run.store).anchors()


def test_what_is_being_written_now_is_no_orphan_however_old_the_anchors_are(tmp_path):
    """A mirror copies an anchor of long ago, files first, beside a newer one that is there already."""
    run = TinyRun(LocalStore(tmp_path / "run"))
    grow(run, tmp_path)
    key = anchor_folder(5, 1) + "model.safetensors"
    run.store.put(key, b"the first of its files")
    anchor_long_ago(run.store, 7, 2 * GRACE)
    assert find_trim(Ledger(run.store), 2, GRACE).orphans == 0
    os.utime(run.store.root / key, (time.time() - 2 * GRACE,) * 2)
    assert find_trim(Ledger(run.store), 2, GRACE).orphans == 1


def anchor_long_ago(store, version, seconds):
    ledger = Ledger(store)
    record = ledger.anchor(ledger.manifest(version))
    store.put(anchor_key(version, record.epoch), replace(record, created_at=time.time() - seconds).to_bytes())


def test_an_empty_store_and_one_without_anchors(run):
    assert find_trim(Ledger(MemoryStore("nothing-here")), 1).keys == ()
    run.origin()
    run.delta()
    assert trimmed(run.store).keys == ()


def test_a_trainer_that_resumes_goes_on_after_a_trimmed_run(run, tmp_path):
    versions = grow(run, tmp_path)
    trimmed(run.store)
    resumed = TinyRun(run.store)
    resumed.bits |= run.bits
    assert resumed.writer.previous == versions[-1]
    origin = resumed.origin(first_bits(seed=5))
    assert (origin.version, origin.epoch, origin.parent) == (10, 2, versions[-1].sha256)
    resumed.anchor(tmp_path / "resumed")
    resumed.delta()
    trim = trimmed(run.store)
    assert trim.first_kept == 10
    assert Ledger(run.store).anchors() == [AnchorRef(10, 2)]
    resumed.check(Ledger(run.store).plan(None, None), None)
    assert Ledger(run.store).epochs() == [1, 2]
    with pytest.raises(ChainError):
        Ledger(run.store).parent(origin)


def test_on_an_object_store_with_readers_that_are_early_late_and_new(proxy, bucket, tmp_path):
    store = open_store(f"s3://{bucket}/run")
    run = TinyRun(store)
    versions = grow(run, tmp_path, versions=6, every=2)
    late = Ledger(open_store(f"s3://{bucket}/run"))
    plan = late.plan(at(versions[1]), None)
    acknowledge(store, versions[3])
    assert trimmed(store).first_kept == 4
    early = Ledger(open_store(f"s3://{bucket}/run"))
    run.check(early.plan(at(versions[3]), None), run.bits[versions[3].sha256])
    with pytest.raises(NotFoundError):
        run.check(plan, run.bits[versions[1].sha256])
    run.check(late.plan(at(versions[1]), None, prefer_anchor=True), None)
    run.check(Ledger(open_store(f"s3://{bucket}/run")).plan(None, None), None)
    assert {key.partition("/")[0] for key in keys(store)} >= {"HEAD.json", "epochs"}
