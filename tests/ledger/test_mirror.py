"""A run copied to another store: whole at every moment, bit for bit, and nobody else's."""

from __future__ import annotations

import contextlib
import threading
import uuid

import pytest
from faulty_store import FAULTS, Died, FaultyStore
from tiny_run import SHAPES, TinyRun, follow, states

from delta_sync import ChainError, ConflictError, FormatError, IntegrityError, StoreError, dtype
from delta_sync.anchor_files import write_anchor_files
from delta_sync.ledger import Ledger
from delta_sync.mirror import Mirror, Stopped
from delta_sync.store import LocalStore, MemoryStore
from delta_sync.store.cache import ObjectCache

RUN = ("epochs/", "deltas/", "manifests/", "anchors/", "HEAD.json")


@pytest.fixture
def cache(tmp_path):
    return ObjectCache(tmp_path / "cache")


@pytest.fixture
def source(tmp_path):
    """Nine versions of two epochs, three anchors; the newest anchor is of version 7."""
    run = TinyRun(LocalStore(tmp_path / "source"))
    run.origin()
    run.anchor(tmp_path / "files-1")
    for _ in range(3):
        run.delta()
    following = TinyRun(run.store)
    following.now, following.number, following.bits = run.now, 10, run.bits
    following.origin()
    following.anchor(tmp_path / "files-5")
    for _ in range(2):
        following.delta()
    following.anchor(tmp_path / "files-7")
    for _ in range(2):
        following.delta()
    return following


@pytest.fixture
def target(tmp_path):
    return LocalStore(tmp_path / "target")


def content(store):
    return {info.key: store.get(info.key, max_bytes=1 << 20) for prefix in RUN for info in store.list(prefix)}


def check_reader(run, store):
    """A reader of the copy gets the run's newest bits."""
    ledger = Ledger(store)
    plan = ledger.plan(None, None)
    assert plan.target.sha256 == run.writer.head.sha256
    found = follow(ledger, plan, None)
    assert all((found[name] == run.now[name]).all() for name in run.now)


def read_whole_or_nothing(run, store):
    """Whatever a reader of the copy finds is a version of the run, complete; or nothing to start from."""
    ledger = Ledger(store)
    head = ledger.head()
    if head is None:
        return
    assert head.sha256 in run.bits
    for manifest in [head, *_ancestors(ledger, head)]:
        for ref in manifest.objects:
            ledger.read_object(ref)
    for anchor in ledger.anchors():
        record = ledger.anchor(ledger.manifest(anchor.version))
        for ref in record.objects:
            ledger.read_object(ref)


def _ancestors(ledger, head):
    with contextlib.suppress(ChainError):  # what is older is copied later
        while (head := ledger.parent(head)) is not None:
            yield head


def test_a_copy_is_the_run_object_by_object(source, target, cache):
    mirror = Mirror(source.store, target, cache)
    assert mirror.copy()
    assert content(target) == content(source.store)
    check_reader(source, target)


def test_it_goes_on_where_it_ended_and_writes_nothing_twice(source, target, cache, tmp_path):
    Mirror(source.store, target, cache).copy()
    source.delta()
    source.anchor(tmp_path / "files-10")
    again = Mirror(source.store, target, cache)
    assert again.copy()
    new = ["delta", "manifest", "HEAD", "weights", "config", "record"]
    assert again.written[0] == len(new)
    assert content(target) == content(source.store)


def test_a_mirror_keeps_up_with_versions_epochs_and_anchors(source, target, cache, tmp_path):
    mirror = Mirror(source.store, target, cache, poll=0)
    mirror.copy()
    for _ in range(3):
        source.delta()
        assert mirror.copy()
        check_reader(source, target)
    later = TinyRun(source.store)
    later.now, later.bits, later.number = source.now, source.bits, 30
    later.origin()
    later.anchor(tmp_path / "later")
    later.delta()
    assert mirror.copy()
    assert content(target) == content(source.store)
    assert mirror.copy()
    check_reader(later, target)


@pytest.mark.parametrize("fault", FAULTS)
def test_ended_or_failed_at_any_call_it_leaves_whole_versions_and_goes_on(source, cache, fault):
    dry = FaultyStore(MemoryStore(uuid.uuid4().hex))
    Mirror(source.store, dry, cache).copy()
    assert {name.split()[0] for name in dry.names} == {"list", "get", "create", "put", "put_file"}
    for number, name in enumerate(dry.names):
        store = MemoryStore(uuid.uuid4().hex)
        faulty = FaultyStore(store)
        mirror = Mirror(source.store, faulty, cache)
        faulty.arm(number, fault)
        try:
            mirror.copy()
        except (StoreError, Died):
            read_whole_or_nothing(source, store)
            if fault.startswith("die"):
                mirror = Mirror(source.store, store, cache)
            assert mirror.copy(), name
        assert content(store) == content(source.store), name


# --- where a copy begins


def test_from_the_newest_anchor_and_later_the_rest(source, target, cache):
    assert Mirror(source.store, target, cache, from_anchor=True).copy()
    copied = content(target)
    assert sorted(key for key in copied if key.startswith("manifests/")) == sorted(
        key for key in content(source.store) if key.startswith("manifests/") and key >= "manifests/000000000007"
    )
    check_reader(source, target)
    source.delta()
    again = Mirror(source.store, target, cache, from_anchor=True)
    assert again.copy()
    assert again.written[0] == 3  # delta, manifest, HEAD
    check_reader(source, target)
    assert Mirror(source.store, target, cache).copy()
    assert content(target) == content(source.store)


def test_a_first_copy_is_of_use_before_old_versions_are_there(source, target, cache):
    order = FaultyStore(target)
    Mirror(source.store, order, cache).copy()
    writes = [name.split()[1] for name in order.names if name.split()[0] in ("put", "create", "put_file")]
    manifests = [int(key[10:22]) for key in writes if key.startswith("manifests/")]
    assert manifests == [7, 8, 9, 1, 2, 3, 4, 5, 6]
    assert writes.index("anchors/000000000007-000002/anchor.json") < writes.index(writes_of(writes, 1))


def writes_of(writes, version):
    return next(key for key in writes if key.startswith(f"manifests/{version:012d}"))


def test_newer_versions_do_not_wait_for_an_anchor(source, target, cache):
    """While an anchor's files are on their way a version is published: it is there before the next file."""

    class Publishing(FaultyStore):
        published = 0

        def put_file(self, key, path):
            super().put_file(key, path)
            if key.startswith("anchors/") and self.published < 3:
                self.published += 1
                source.delta()

    store = Publishing(target)
    assert Mirror(source.store, store, cache, poll=0).copy()
    names = [name.split()[1] for name in store.names if name.split()[0] in ("create", "put_file")]
    first_file = next(i for i, key in enumerate(names) if key.startswith("anchors/"))
    assert names[first_file + 1].startswith("deltas/000000000010")
    assert names[first_file + 2].startswith("manifests/000000000010")
    check_reader(source, target)


def test_air_gap(source, cache, tmp_path):
    """To a folder, carried, from the folder; and the next time only what is new."""
    carried, far = LocalStore(tmp_path / "disk"), LocalStore(tmp_path / "far")
    for _ in range(2):
        assert Mirror(source.store, carried, cache).copy()
        assert Mirror(carried, far, cache).copy()
        check_reader(source, far)
        source.delta()
    assert Mirror(source.store, LocalStore(tmp_path / "disk-2"), cache, from_anchor=True).copy()
    assert Mirror(LocalStore(tmp_path / "disk-2"), far, cache).copy()
    check_reader(source, far)


def test_a_run_without_any_anchor_is_copied_from_its_start(target, cache, tmp_path):
    run = TinyRun(LocalStore(tmp_path / "plain"))
    run.origin()
    run.delta()
    assert Mirror(run.store, target, cache, from_anchor=True).copy()
    assert content(target) == content(run.store)


def test_before_the_first_version_there_is_nothing_to_copy(target, cache, tmp_path):
    empty = LocalStore(tmp_path / "empty")
    mirror = Mirror(empty, target, cache)
    assert not mirror.copy()
    assert content(target) == {}
    run = TinyRun(empty)
    run.origin()
    assert mirror.copy()
    assert content(target) == content(empty)


# --- damage


def spoil(store, key):
    path = store.root / key
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return lambda: path.write_bytes(whole)


def key_of(store, start):
    return next(info.key for info in store.list(start))


@pytest.mark.parametrize("missing", [False, True])
def test_a_damaged_object_is_never_passed_on_and_one_healed_later_is_picked_up(source, target, cache, missing):
    key = key_of(source.store, "deltas/000000000008")
    heal = spoil(source.store, key)
    if missing:
        source.store.delete(key)
    mirror = Mirror(source.store, target, cache)
    assert not mirror.copy()
    assert any(key in what for what in mirror.damage)
    assert key not in content(target)
    assert mirror.reached.version == 7, "no version is visible without its objects"
    assert Ledger(target).head().version == 7
    heal()
    assert mirror.copy()
    assert content(target) == content(source.store)
    check_reader(source, target)


def test_an_anchor_leads_past_damage(source, target, cache, tmp_path):
    Mirror(source.store, target, cache).copy()
    source.delta()
    lost = source.delta()
    source.store.delete(lost.objects[0].key)
    source.delta()
    mirror = Mirror(source.store, target, cache)
    assert not mirror.copy()
    assert Ledger(target).head().version == 10
    source.anchor(tmp_path / "past", source.writer.head)
    assert not mirror.copy()
    assert [lost.objects[0].key in what for what in mirror.damage] == [True]
    assert Ledger(target).head().version == 12
    check_reader(source, target)
    source.delta()
    assert not mirror.copy()
    check_reader(source, target)


@pytest.mark.parametrize("start", ["anchors/000000000007-000002/model", "anchors/000000000007-000002/anchor.json"])
def test_a_damaged_anchor_is_left_out_and_taken_once_it_is_whole(source, target, cache, start):
    heal = spoil(source.store, key_of(source.store, start))
    mirror = Mirror(source.store, target, cache)
    assert not mirror.copy()
    assert "anchors/000000000007-000002/anchor.json" not in content(target)
    check_reader(source, target)  # from an older anchor
    heal()
    assert mirror.copy()
    assert content(target) == content(source.store)


def test_a_damaged_newest_manifest_is_not_passed_on(source, target, cache):
    heal = spoil(source.store, source.writer.head.key)
    with pytest.raises((FormatError, IntegrityError)):
        Mirror(source.store, target, cache).copy()
    assert source.writer.head.key not in content(target)
    heal()
    assert Mirror(source.store, target, cache).copy()


def test_a_damaged_old_manifest_is_left_out_until_it_is_whole(source, target, cache):
    heal = spoil(source.store, key_of(source.store, "manifests/000000000003"))
    mirror = Mirror(source.store, target, cache)
    assert not mirror.copy()
    assert "manifests/000000000003" not in str(sorted(content(target)))
    check_reader(source, target)
    heal()
    assert mirror.copy()
    assert content(target) == content(source.store)


def test_a_damaged_claim_is_not_passed_on(source, target, cache):
    heal = spoil(source.store, "epochs/000001.json")
    mirror = Mirror(source.store, target, cache)
    assert not mirror.copy()
    assert "epochs/000001.json" not in content(target)
    check_reader(source, target)
    heal()
    assert mirror.copy()


def test_check_heals_what_was_damaged_at_the_destination(source, target, cache):
    Mirror(source.store, target, cache).copy()
    for start in ("deltas/000000000003", "manifests/000000000004", "anchors/000000000005-000002/model", "HEAD"):
        spoil(target, key_of(target, start))
    target.delete("deltas/" + key_of(target, "deltas/000000000009").partition("/")[2])
    checked = Mirror(source.store, target, cache, check=True)
    assert checked.copy()
    assert content(target) == content(source.store)
    assert checked.written[0] == 6, "what is whole is not written again, but for HEAD"


def test_a_replaced_anchor_replaces_its_copy(source, target, cache, tmp_path):
    mirror = Mirror(source.store, target, cache)
    mirror.copy()
    manifest = Ledger(source.store).manifest(7)
    attach_sharded(source, manifest, tmp_path / "sharded")
    mirror._rechecked = -float("inf")  # a minute later
    assert mirror.copy()
    assert content(target) == content(source.store)


def attach_sharded(run, manifest, folder):
    bits = run.bits[manifest.sha256]
    tensors = [(name, dtype("BF16"), SHAPES[name], bits[name]) for name in bits]
    files = write_anchor_files(folder, tensors, shard_bytes=32)
    assert len(files) > 2
    run.writer.attach_anchor(manifest, files, states(bits))


# --- whose run it is


def test_a_destination_of_another_run_is_refused_and_left_alone(source, target, cache, tmp_path):
    other = TinyRun(target)
    other.origin()
    other.anchor(tmp_path / "other")
    before = content(target)
    with pytest.raises(ConflictError, match="empty folder"):
        Mirror(source.store, target, cache).copy()
    assert content(target) == before


def test_a_trainer_at_the_destination_ends_the_mirror(source, target, cache):
    """What fails over to a copy goes on there; the mirror writes nothing more."""
    mirror = Mirror(source.store, target, cache)
    mirror.copy()
    there = TinyRun(target)
    there.now = source.now
    there.origin()
    before = content(target)
    source.delta()
    for each in (mirror, Mirror(source.store, target, cache)):
        with pytest.raises(ConflictError):
            each.copy()
    assert content(target) == before


def test_a_fork_of_the_same_run_is_refused(source, target, cache):
    """Both were copied while they were one, and then went on apart in the same epoch number."""
    Mirror(source.store, target, cache).copy()
    TinyRun(target).origin()
    TinyRun(source.store).origin()
    before = content(target)
    with pytest.raises(ConflictError):
        Mirror(source.store, target, cache).copy()
    assert content(target) == before


def test_two_mirrors_to_one_destination_do_no_harm(source, target, cache):
    mirrors = [Mirror(source.store, target, cache) for _ in range(2)]
    threads = [threading.Thread(target=mirror.copy) for mirror in mirrors]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert content(target) == content(source.store)


def test_a_taken_over_writer_s_versions_are_left_aside(source, target, cache):
    """An epoch's writer that was fenced may leave a manifest that is none of the run's."""
    stale = source.writer
    later = TinyRun(source.store)
    later.now, later.bits = source.now, source.bits
    with contextlib.suppress(ConflictError):
        commit_unfenced(stale, source)
    later.origin()
    mirror = Mirror(source.store, target, cache)
    assert mirror.copy()
    assert Ledger(target).head().sha256 == Ledger(source.store).head().sha256
    assert len([key for key in content(target) if key.startswith("manifests/000000000010")]) == 1


def commit_unfenced(writer, run):
    """Commit as if the look for a newer claim had come a moment too early."""
    check, writer._check_fence = writer._check_fence, lambda *_: None
    try:
        run.delta()
    finally:
        writer._check_fence = check


def test_stopping_ends_between_two_objects(source, target, cache):
    stop = threading.Event()
    mirror = Mirror(source.store, target, cache, stop=stop)
    stop.set()
    with pytest.raises(Stopped):
        mirror.copy()
