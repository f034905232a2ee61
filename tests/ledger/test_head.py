"""Which version is the newest, whatever HEAD says and whoever else writes."""

from __future__ import annotations

import hashlib
import threading
import time
from dataclasses import replace

import pytest
from tiny_run import TinyRun, changed, commit_delta, commit_origin, first_bits

from delta_sync import ChainError, ConflictError, FormatError, IntegrityError
from delta_sync.ledger import Ledger
from delta_sync.limits import for_model
from delta_sync.manifest import Manifest
from delta_sync.plan import Position
from delta_sync.records import Epoch, Head
from delta_sync.store.keys import HEAD, epoch_key
from delta_sync.writer import Writer


def position(manifest):
    return Position(manifest.version, manifest.sha256)


def hint(store, to, **changes):
    head = Head(to.run, to.epoch, to.writer, to.version, to.sha256)
    store.put(HEAD, replace(head, **changes).to_bytes())


def put_manifest(store, manifest):
    store.put(manifest.key, manifest.to_bytes())
    return manifest


def flip(store, key, at=-20):
    data = bytearray(store.get(key, max_bytes=10**9))
    data[at] ^= 1
    store.put(key, bytes(data))


@pytest.mark.parametrize("head", ["missing", "old", "garbage", "empty", "other run", "ahead", "huge"])
def test_head_is_only_a_hint(run, head):
    first = run.origin()
    watching = Ledger(run.store)
    assert watching.head() == first
    versions = [first, *(run.delta() for _ in range(3))]
    match head:
        case "missing":
            run.store.delete(HEAD)
        case "old":
            hint(run.store, first)
        case "garbage":
            run.store.put(HEAD, b"\x00\xff{")
        case "empty":
            run.store.put(HEAD, b"")
        case "other run":
            hint(run.store, first, run="somebody-else")
        case "ahead":
            hint(run.store, versions[-1], version=99, manifest="0" * 64)
        case "huge":
            run.store.put(HEAD, b" " * 10**6)
    assert watching.head() == versions[-1]
    assert Ledger(run.store).head() == versions[-1]
    assert len(watching.plan(position(first), None).deltas) == 3


def test_head_never_moves_a_reader_backwards(run):
    first = run.origin()
    newest = run.delta()
    ledger = Ledger(run.store)
    assert ledger.head() == newest
    hint(run.store, first)
    assert ledger.head() == newest
    assert ledger.plan(position(newest), None) is None
    assert ledger.wait_newer(position(newest), time.monotonic() + 0.05, poll_seconds=0.01) is None


def test_a_lagging_listing_does_not_move_a_reader_backwards(run):
    run.origin()
    newest = run.delta()
    ledger = Ledger(run.store)
    assert ledger.head() == newest
    Writer.open(Ledger(run.store))  # a claim makes readers list again
    run.store.list = lambda prefix: (info for info in type(run.store).list(run.store, prefix) if newest.key != info.key)
    assert ledger.head() == newest
    assert ledger.plan(position(newest), None) is None


def test_watching_costs_three_small_reads(memory):
    from faulty_store import FaultyStore

    counting = FaultyStore(memory)
    run = TinyRun(memory)
    run.origin()
    ledger = Ledger(counting)
    ledger.head()
    counting.names.clear()
    newest = ledger.head()
    assert sorted(counting.names) == [  # all at once
        "get HEAD.json", f"get {newest.key.replace('000000000001', '000000000002')}", f"info {epoch_key(2)}",
    ]  # fmt: skip


def test_a_replica_that_waits_takes_a_version_without_looking_for_the_next(memory):
    """Two round trips less on its way; what came just then is found by the next look."""
    from faulty_store import FaultyStore

    run = TinyRun(memory)
    at = position(run.origin())
    counting = FaultyStore(memory)
    ledger = Ledger(counting)
    ledger.head()
    run.delta(), run.delta()
    memory.delete(HEAD)  # else the newer one is taken at once
    for number in (2, 3):
        counting.names.clear()
        newest = ledger.wait_newer(at, time.monotonic() + 5)
        assert newest.version == number
        assert not [name for name in counting.names if f"manifests/{number + 1:012}" in name]
        counting.names.clear()
        plan = ledger.plan(at, None, newest=newest)
        assert plan.target == newest and not [name for name in counting.names if "HEAD" in name or "epochs" in name]
        at = plan.position
    assert ledger.wait_newer(at, time.monotonic() + 0.05, poll_seconds=0.01) is None


def test_a_writer_may_look_around_while_objects_are_uploaded(memory):
    """Then the fence is looked at once a version, after its manifest; a failed commit looks before it begins again."""
    from faulty_store import FaultyStore

    counting = FaultyStore(memory)
    writer = Writer.open(Ledger(counting))
    bits = first_bits()
    commit_origin(writer, bits)
    for looks in (True, False, True):
        counting.names.clear()
        if looks:
            writer.look_around()
        after = changed(bits, writer.next_version)
        commit_delta(writer, bits, after)
        bits = after
        created = next(i for i, name in enumerate(counting.names) if name.startswith("create manifests/"))
        fences = [i for i, name in enumerate(counting.names) if name.startswith("get epochs/000001")]
        assert len(fences) == 2 and fences[0] < created < fences[1]
    Writer.open(Ledger(memory))
    with pytest.raises(ConflictError, match="second publisher"):
        writer.look_around()


def test_catching_up_reads_only_the_versions_in_between(memory, tmp_path):
    from faulty_store import FaultyStore

    run = TinyRun(memory)
    versions = [run.origin(), *(run.delta() for _ in range(30))]
    run.anchor(tmp_path)
    counting = FaultyStore(memory)
    ledger = Ledger(counting)
    assert ledger.plan(position(versions[-4]), None).start == "position"
    read = [name for name in counting.names if name.startswith("get manifests/")]
    assert len(read) == 4  # the newest three, and the one where it is
    counting.names.clear()
    assert Ledger(counting).plan(None, None).start == "anchor"
    assert len([name for name in counting.names if name.startswith("get manifests/")]) == 1


def test_wait_newer_sees_a_commit_a_deadline_and_a_stop(run):
    first = run.origin()
    ledger = Ledger(run.store)
    started = time.monotonic()
    assert ledger.wait_newer(position(first), started + 0.1, poll_seconds=0.01) is None
    assert time.monotonic() - started < 5
    stop = threading.Event()
    threading.Timer(0.05, stop.set).start()
    started = time.monotonic()
    assert ledger.wait_newer(position(first), started + 60, stop) is None
    assert time.monotonic() - started < 10
    timer = threading.Timer(0.05, run.delta)
    timer.start()
    found = ledger.wait_newer(position(first), time.monotonic() + 60, poll_seconds=0.01)
    timer.join()
    assert found == run.writer.head


def test_a_claim_without_a_version_does_not_make_every_look_a_listing(memory):
    from faulty_store import FaultyStore

    run = TinyRun(memory)
    run.origin()
    counting = FaultyStore(memory)
    ledger = Ledger(counting, relist_seconds=60)
    ledger.head()
    second = Writer.open(Ledger(memory))
    counting.names.clear()
    for _ in range(5):
        assert ledger.head() == run.writer.head
    assert not [name for name in counting.names if name.startswith("list")]
    resumed = commit_origin(second, run.now)
    assert ledger.head() == resumed  # HEAD changed, so it is listed at once


def test_a_new_epoch_is_found_without_head_too(memory):
    run = TinyRun(memory)
    run.origin()
    ledger = Ledger(memory, relist_seconds=0.05)
    ledger.head()
    second = Writer.open(Ledger(memory))
    ledger.head()
    resumed = commit_origin(second, run.now)
    hint(memory, run.writer.head)
    newer = ledger.wait_newer(position(run.writer.head), time.monotonic() + 30, poll_seconds=0.01)
    assert newer == resumed


# --- two writers


def test_a_second_publisher_stops_the_first(run):
    run.origin()
    second = Writer.open(Ledger(run.store))
    with pytest.raises(ConflictError) as caught:
        run.delta()
    assert run.writer.writer in str(caught.value)
    assert second.writer in str(caught.value)
    assert "stop this trainer" in caught.value.remedy
    assert second.previous == run.writer.head
    with pytest.raises(ConflictError):
        run.writer.attach_anchor(run.writer.head, {"model.safetensors": b""}, {})


def race(run, monkeypatch):
    """The first writer passes its check, the second claims, then the first one's manifest lands."""
    second = None
    real = run.store.create

    def create(key, data):
        nonlocal second
        if key.startswith("manifests/") and second is None:
            second = Writer.open(Ledger(run.store))
        real(key, data)

    monkeypatch.setattr(run.store, "create", create)
    with pytest.raises(ConflictError, match="may be left out"):
        run.delta()
    return second


def test_a_late_manifest_of_the_first_writer_loses(run, monkeypatch, tmp_path):
    origin = run.origin()
    before = Ledger(run.store)
    before.head()
    second = race(run, monkeypatch)
    fooled = Ledger(run.store)
    late = fooled.head()  # nobody has committed in epoch 2 yet, so the late one is the newest
    assert (late.version, late.epoch) == (2, 1)
    bits = first_bits(seed=5)
    resumed = commit_origin(second, bits)
    assert (resumed.version, resumed.epoch, resumed.parent) == (2, 2, origin.sha256)
    for reader in (before, fooled, Ledger(run.store)):
        assert reader.head() == resumed
    # who took the losing version needs complete weights, and is told so
    with pytest.raises(ChainError, match="attach an anchor"):
        fooled.plan(position(late), late.state_digest)
    run.bits[resumed.sha256] = bits
    run.writer = second
    run.anchor(tmp_path, resumed)
    plan = fooled.plan(position(late), late.state_digest)
    assert plan.start == "anchor"
    run.check(plan, None)
    with pytest.raises(ChainError, match="other manifests"):
        Ledger(run.store).parent(put_manifest(run.store, replace(resumed, version=3, epoch=3, parent="0" * 64)))


def test_a_late_manifest_that_has_a_descendant_still_loses(run, monkeypatch):
    """A store that lags may let a fenced-off writer go on for a while: the higher epoch wins, even when shorter."""
    run.origin()
    second = race(run, monkeypatch)
    late = Ledger(run.store).head()
    longer = put_manifest(run.store, replace(late, version=3, base_version=2, parent=late.sha256))
    resumed = commit_origin(second, first_bits(seed=5))
    assert longer.version > resumed.version
    assert Ledger(run.store).head() == resumed


def test_an_epoch_that_continues_nothing_loses(run):
    origin = run.origin()
    second = run.delta()
    put_manifest(run.store, replace(second, epoch=2, writer="stray", parent="0" * 64))
    assert Ledger(run.store).head() == second
    put_manifest(run.store, replace(second, epoch=3, writer="stray", version=3, base_version=2, parent="0" * 64))
    with pytest.raises(ChainError, match="second publisher"):
        Ledger(run.store).head()  # passing it over would lose version 3, if it is one
    assert Ledger(run.store).manifest(1, origin.sha256) == origin


def test_two_writers_in_one_epoch_are_decided_by_the_claim(run):
    run.origin()
    mine = run.delta()
    put_manifest(run.store, replace(mine, writer="a-stranger", created_at=1.0))
    assert Ledger(run.store).head() == mine
    run.store.put(epoch_key(1), Epoch(mine.run, 1, "nobody", 1.0).to_bytes())
    with pytest.raises(ChainError, match="nobody"):
        Ledger(run.store).head()


def test_writers_race_for_an_epoch(store):
    writers, errors = [], []

    def claim():
        try:
            writers.append(Writer.open(Ledger(store)))
        except Exception as error:  # noqa: BLE001 - shown by the assertion below
            errors.append(error)

    threads = [threading.Thread(target=claim) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not errors
    assert sorted(writer.epoch for writer in writers) == [1, 2, 3, 4, 5, 6]
    assert len({writer.run for writer in writers}) == 1


def test_another_run_in_the_store_is_a_conflict(run):
    run.origin()
    with pytest.raises(ConflictError, match="another folder"):
        Writer.open(Ledger(run.store), run="my-run")
    assert Writer.open(Ledger(run.store), run=run.writer.run).epoch == 2


@pytest.mark.parametrize("damage", [b"", b"{", b" " * 10**6])
def test_a_damaged_claim_is_somebodys_and_does_not_end_the_run(run, damage):
    run.origin()
    run.store.put(epoch_key(2), damage)
    with pytest.raises(ConflictError, match="unreadable claim of epoch 2"):
        run.delta()
    third = Writer.open(Ledger(run.store))
    assert (third.epoch, third.run, third.previous) == (3, run.writer.run, run.writer.head)
    for epoch in (1, 3):
        run.store.put(epoch_key(epoch), damage)
    with pytest.raises((FormatError, IntegrityError)):
        Writer.open(Ledger(run.store))


# --- resumed runs


def test_a_resumed_run_continues_the_versions(run, tmp_path):
    run.origin()
    last = run.delta()
    again = TinyRun(run.store)
    assert again.writer.previous == last
    again.bits = run.bits
    resumed = again.origin(changed(run.now, 77))
    again.anchor(tmp_path)
    after = again.delta()
    assert (resumed.version, resumed.epoch, after.version) == (3, 2, 4)
    plan = Ledger(run.store).plan(position(last), last.state_digest)
    assert (plan.start, plan.deltas) == ("anchor", (after,))
    again.check(plan, None)


def test_a_run_resumed_with_the_very_same_bits_needs_no_anchor(run):
    run.origin()
    last = run.delta()
    again = TinyRun(run.store)
    again.bits = run.bits
    again.origin(run.now)
    newest = again.delta()
    plan = Ledger(run.store).plan(position(last), None)
    assert (plan.start, plan.deltas) == ("position", (newest,))
    again.check(plan, run.bits[last.sha256])


def test_an_emptied_store_starts_over(run):
    run.origin()
    old = run.delta()
    ledger = Ledger(run.store)
    assert ledger.head() == old
    for info in list(run.store.list("")):
        run.store.delete(info.key)
    assert ledger.head() is None
    assert ledger.plan(position(old), None) is None
    fresh = TinyRun(run.store)
    origin = fresh.origin()
    assert origin.run != old.run
    assert ledger.head() == origin
    assert ledger.plan(position(old), origin.state_digest).start == "live"


# --- damage


def test_a_corrupt_newest_manifest_is_reported_and_changes_nothing(run):
    first = run.origin()
    ledger = Ledger(run.store)
    assert ledger.head() == first
    newest = run.delta()
    good = newest.to_bytes()
    for bad in (good[:-10], b"", good.replace(b'"all"', b'"none"')):
        run.store.put(newest.key, bad)
        for reader in (ledger, Ledger(run.store)):
            with pytest.raises((FormatError, IntegrityError)):
                reader.plan(position(first), None)
    run.store.put(newest.key, good)
    assert ledger.plan(position(first), None).deltas == (newest,)


def test_a_damaged_manifest_is_parsed_once_however_often_it_is_looked_at(run, monkeypatch):
    run.origin()
    newest = run.delta()
    run.store.put(newest.key, newest.to_bytes()[:-10])
    parsed = []
    original = Manifest.from_bytes

    def counting(data, **limits):
        parsed.append(len(data))
        return original(data, **limits)

    monkeypatch.setattr(Manifest, "from_bytes", counting)
    reader = Ledger(run.store)
    said = set()
    for _ in range(5):
        with pytest.raises(FormatError) as caught:
            reader.head()
        said.add(str(caught.value))
    assert len(parsed) == 1 and len(said) == 1
    run.store.put(newest.key, newest.to_bytes())
    assert reader.head() == newest


def test_a_reader_that_knows_its_model_reads_no_larger_manifest(run):
    first = run.origin()
    limits = for_model(len(first.tensors))
    assert Ledger(run.store, limits).head() == first
    large = replace(first, extra={"x": "y" * limits.manifest_bytes})
    run.store.put(first.key, large.to_bytes())
    run.store.delete(HEAD)
    assert Ledger(run.store).head() == large
    with pytest.raises(IntegrityError, match=f"{limits.manifest_bytes}"):
        Ledger(run.store, limits).head()


def test_a_corrupt_manifest_on_the_way_is_an_integrity_error_until_an_anchor_passes_it(run, tmp_path):
    first = run.origin()
    broken = run.delta()
    run.delta()
    flip(run.store, broken.key)
    for reader in (Ledger(run.store), Ledger(run.store)):
        with pytest.raises(IntegrityError, match="sha256"):
            reader.plan(position(first), None)
    run.anchor(tmp_path)
    plan = Ledger(run.store).plan(position(first), None)
    assert plan.start == "anchor"
    run.check(plan, None)


def test_a_gap_is_a_chain_error_until_an_anchor_passes_it(run, tmp_path):
    first = run.origin()
    missing = run.delta()
    newest = run.delta()
    run.store.delete(missing.key)
    ledger = Ledger(run.store)
    with pytest.raises(ChainError, match="attach an anchor"):
        ledger.plan(position(first), None)
    with pytest.raises(ChainError):
        ledger.ancestors(newest, 1)
    run.anchor(tmp_path)
    assert Ledger(run.store).plan(position(first), None).start == "anchor"


def test_a_run_continues_after_its_newest_manifest_is_damaged(run, tmp_path):
    run.origin()
    broken = run.delta()
    run.store.put(broken.key, b"{")
    again = TinyRun(run.store)
    assert again.writer.previous is None
    with pytest.raises(ChainError, match="commit an origin"):
        again.delta()
    resumed = again.origin()
    again.anchor(tmp_path)
    assert (resumed.version, resumed.epoch) == (3, 2)
    assert resumed.parent == hashlib.sha256(b"{").hexdigest()
    plan = Ledger(run.store).plan(position(broken), None)
    assert (plan.start, plan.target) == ("anchor", resumed)


def test_a_version_that_was_damaged_when_it_was_first_read_does_not_stick(run):
    first = run.origin()
    altered = run.delta()
    good = altered.to_bytes()
    run.store.delete(HEAD)  # nothing else knows the right hash yet
    run.store.put(altered.key, good.replace(b'"all"', b'"none"'))
    ledger = Ledger(run.store)
    assert ledger.head().prompt_cache == "none"
    newest = run.delta()
    run.store.put(altered.key, good)
    plan = ledger.plan(position(first), None)
    assert plan.deltas == (altered, newest)
    run.check(plan, run.bits[first.sha256])


def test_a_foreign_file_among_the_manifests_is_ignored(run):
    newest = run.origin()
    for key in ("manifests/notes.txt", "manifests/1-1-x.json", "manifests/x/000000000009-000001-w.json"):
        run.store.put(key, b"?")
    assert Ledger(run.store).head() == newest


def test_a_manifest_under_another_key_is_refused(run):
    run.origin()
    newest = run.delta()
    run.store.put(newest.key.replace("000000000002", "000000000003"), newest.to_bytes())
    with pytest.raises(IntegrityError, match="key of a manifest"):
        Ledger(run.store).head()


def test_manifest_by_version(run, monkeypatch):
    origin = run.origin()
    second = race(run, monkeypatch)
    resumed = commit_origin(second, run.now)
    last = commit_delta(second, run.now, changed(run.now, 3))
    ledger = Ledger(run.store)
    assert [ledger.manifest(version) for version in (1, 2, 3)] == [origin, resumed, last]
    with pytest.raises(ChainError):
        ledger.manifest(4)
    with pytest.raises(ChainError):
        ledger.manifest(2, "0" * 64)


@pytest.mark.parametrize("version", [0, -1])
def test_there_is_no_version_before_the_first(run, version):
    run.origin()
    for _ in range(2):
        with pytest.raises(ChainError, match=f"version {version}, expected a manifest"):
            Ledger(run.store).manifest(version)
        run.delta()
