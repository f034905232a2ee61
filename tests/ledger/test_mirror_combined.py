"""A mirror together with the rest: folds, signatures, and retention on either side while it copies."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tiny_run import TinyRun, follow

from delta_sync.delta import fold
from delta_sync.delta_file import decode_delta
from delta_sync.errors import SignatureError
from delta_sync.fold_writer import attach_fold
from delta_sync.keys import SigningKey
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.mirror import Mirror
from delta_sync.plan import Position
from delta_sync.retention import delete, find_trim
from delta_sync.signing import PublicKeys
from delta_sync.store import LocalStore
from delta_sync.store.cache import ObjectCache
from delta_sync.store.keys import HEAD, anchor_key, epoch_key, fold_key

KEY, OTHER = SigningKey.generate(), SigningKey.generate()
PINNED = PublicKeys([KEY.public])


@pytest.fixture
def cache(tmp_path):
    return ObjectCache(tmp_path / "cache")


@pytest.fixture
def run(tmp_path):
    """A signed run of nine versions, with anchors at 1, 4 and 7."""
    run = TinyRun(LocalStore(tmp_path / "source"), key=KEY)
    run.versions = [run.origin()]
    run.anchor(tmp_path / "1")
    grow(run, tmp_path, 9)
    return run


@pytest.fixture
def target(tmp_path):
    return LocalStore(tmp_path / "target")


def grow(run, tmp_path, last):
    for version in range(len(run.versions) + 1, last + 1):
        run.versions.append(run.delta())
        if version % 3 == 1:
            run.anchor(tmp_path / str(version))


def trim(store, keep=1):
    delete(store, find_trim(Ledger(store), keep, 0.0).keys)


def content(store):
    return {info.key: store.get(info.key, max_bytes=1 << 20) for info in store.list("")}


def manifests(store):
    return sorted(int(info.key[10:22]) for info in store.list("manifests/"))


def compact(run, base, target, key=None):
    path = run.versions[base:target]
    ledger, folded, after = Ledger(run.store), {}, {}
    for manifest in path:
        for delta in (delta for ref in manifest.objects for delta in decode_delta(ledger.read_object(ref))[1]):
            folded[delta.name] = fold([*folded.get(delta.name, ()), delta])
        after |= manifest.tensors
    deltas = [delta for deltas in folded.values() for delta in deltas]
    return attach_fold(run.store, run.versions[base - 1], path[-1], deltas, after, key)


def check_reader(run, store, keys=PINNED):
    """One that begins at the copy, and pins the trainer's key, gets the run's newest bits."""
    ledger = Ledger(store, keys=keys)
    plan = ledger.plan(None, None)
    found = follow(ledger, plan, None)
    assert all((found[name] == bits).all() for name, bits in run.bits[plan.target.sha256].items())
    return plan


def a_minute_later(mirror):
    mirror._rechecked = -float("inf")


# --- folds and signatures


def test_folds_and_signatures_come_along_and_stay_valid(run, target, cache):
    compact(run, 1, 6, KEY)
    compact(run, 7, 9, KEY)
    mirror = Mirror(run.store, target, cache)
    assert mirror.copy()
    assert content(target) == content(run.store), "HEAD with the trainer's signature too"
    plan = check_reader(run, target)
    assert [(step.base_version, step.version) for step in plan.deltas] == [(7, 9)]
    reader = Ledger(target, keys=PINNED)
    for place in reader.folds():
        assert reader.fold(reader.manifest(place.version), place.base_version).signature.key == KEY.id
    PINNED.check(type(run.writer.claim), content(target)[epoch_key(1)], "the claim")


def test_a_signed_head_that_came_late_is_copied_later(run, target, cache):
    head = content(run.store)[HEAD]
    run.store.delete(HEAD)
    mirror = Mirror(run.store, target, cache)
    assert mirror.copy()
    assert content(target)[HEAD] != head
    run.store.put(HEAD, head)
    a_minute_later(mirror)
    assert mirror.copy()
    assert content(target)[HEAD] == head


def test_a_fold_whose_base_was_deleted_is_copied_and_leads_who_is_there(run, target, cache):
    compact(run, 2, 8, KEY)
    trim(run.store)
    assert manifests(run.store) == [7, 8, 9]
    assert Mirror(run.store, target, cache).copy()
    old = run.versions[1]
    plan = Ledger(target, keys=PINNED).plan(Position(2, old.sha256), None)
    assert [(step.base_version, step.version) for step in plan.deltas] == [(2, 8), (8, 9)]
    follow(Ledger(target), plan, run.bits[old.sha256])


def test_what_no_pinned_key_signed_is_not_passed_on(run, target, cache):
    compact(run, 1, 6, OTHER)
    compact(run, 7, 9)
    ledger = Ledger(run.store)
    record = ledger.anchor(run.versions[6])
    run.store.put(anchor_key(7, 1), replace(record, created_at=record.created_at + 1).to_bytes())
    run.store.put(epoch_key(1), replace(ledger.epoch(1), signature=None).to_bytes())
    bad = {fold_key(6, 1, 1), fold_key(9, 1, 7), anchor_key(7, 1), epoch_key(1)}
    mirror = Mirror(run.store, target, cache, keys=PINNED)
    assert not mirror.copy()
    assert mirror.damage.keys() == bad
    assert all(isinstance(error, SignatureError) for error in mirror.damage.values())
    assert not bad & content(target).keys()
    assert manifests(target) == list(range(1, 10))
    assert check_reader(run, target).anchor.version == 4


def test_a_version_that_no_pinned_key_signed_ends_the_copy_before_it(run, target, cache):
    good = run.versions[8]
    run.store.put(good.key, replace(good, signature=None).to_bytes())
    with pytest.raises(SignatureError):
        Mirror(run.store, target, cache, keys=PINNED).copy()
    assert manifests(target) == []


# --- retention on either side


def test_a_copy_that_fell_behind_what_was_deleted_goes_on_at_an_anchor(run, target, cache, tmp_path):
    """The anchor comes before the first version behind the gap, so that a reader of the copy always has a start."""
    Mirror(run.store, target, cache).copy()
    grow(run, tmp_path, 15)
    trim(run.store)
    assert manifests(run.store) == [13, 14, 15]
    order = []

    class Watched(LocalStore):
        def create(self, key, data):
            super().create(key, data)
            order.append(key)
            check_reader(run, target)

    mirror = Mirror(run.store, Watched(target.root), cache)
    record = run.store.get(anchor_key(13, 1), max_bytes=1 << 20)
    run.store.delete(anchor_key(13, 1))
    assert not mirror.copy() and "attach an anchor" in str([*mirror.damage.values()])
    assert order == []
    run.store.put(anchor_key(13, 1), record)
    assert mirror.copy()
    assert [int(key[10:22]) for key in order] == [13, 14, 15]
    assert check_reader(run, target).target.version == 15


def test_retention_at_the_copy_is_not_undone(run, target, cache, tmp_path):
    mirror = Mirror(run.store, target, cache, from_anchor=True)
    assert mirror.copy()
    grow(run, tmp_path, 13)
    assert mirror.copy()
    a_minute_later(mirror)
    assert mirror.copy()
    trim(target)
    assert manifests(target) == [13]
    before = content(target)
    a_minute_later(mirror)
    assert mirror.copy()
    assert content(target) == before
    assert Mirror(run.store, target, cache, from_anchor=True).copy()
    assert content(target) == before
    grow(run, tmp_path, 14)
    assert mirror.copy()
    assert manifests(target) == [13, 14] and Ledger(target).anchors() == [AnchorRef(13, 1)]
    check_reader(run, target)


def test_retention_at_the_copy_leaves_an_anchor_alone_that_is_on_its_way(run, target, cache):
    """Anchors come newest first, and are all older than the grace by what their records say."""

    class Trimmed(LocalStore):
        def put_file(self, key, path):
            super().put_file(key, path)
            if key.startswith("anchors/"):
                delete(target, find_trim(Ledger(target), 3, 60.0).keys)

    assert Mirror(run.store, Trimmed(target.root), cache).copy()
    assert content(target) == content(run.store)


def test_retention_at_the_source_while_it_is_copied(run, target, cache, tmp_path):
    class Trimming(LocalStore):
        writes = 0

        def put_file(self, key, path):
            super().put_file(key, path)
            Trimming.writes += 1
            if Trimming.writes in (3, 6):
                grow(run, tmp_path, len(run.versions) + 3)
                trim(run.store)

    mirror = Mirror(run.store, Trimming(target.root), cache, poll=0)
    while Trimming.writes < 6 or not mirror.copy():
        mirror.copy()
    assert check_reader(run, target).target.sha256 == run.writer.head.sha256
