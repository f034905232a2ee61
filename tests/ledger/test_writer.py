"""What a commit promises, and what it does with a store that answers badly."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pytest
from faulty_store import Died, FaultyStore
from tiny_run import SHAPES, TOTAL, TinyRun, attach, changed, commit_delta, commit_origin, first_bits, states

from delta_sync import (
    ChainError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    StoreError,
    model_fingerprint,
    state_digest,
)
from delta_sync.ack import Ack
from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.ledger import Ledger
from delta_sync.store.keys import HEAD, anchor_folder, anchor_key
from delta_sync.writer import Writer, default_writer


@pytest.fixture
def faulty(memory):
    return FaultyStore(memory)


def test_objects_then_manifest_then_head(faulty):
    run = TinyRun(faulty)
    run.origin()
    faulty.names.clear()
    manifest = run.delta()
    writes = [name for name in faulty.names if not name.startswith(("get", "list", "info"))]
    assert writes == [f"put {manifest.objects[0].key}", f"create {manifest.key}", f"put {HEAD}"]


def test_the_first_version_is_an_origin(store):
    writer = Writer.open(Ledger(store))
    bits = first_bits()
    with pytest.raises(ChainError, match="commit an origin"):
        commit_delta(writer, bits, changed(bits, 1))
    assert Ledger(store).head() is None


def test_a_step_without_changes_is_an_empty_delta(run):
    before = run.origin()
    manifest = commit_delta(run.writer, run.now, run.now)
    assert (manifest.objects, manifest.state_digest) == ((), before.state_digest)
    run.bits[manifest.sha256] = run.now
    run.check(Ledger(run.store).plan(None, before.state_digest), run.now)


def test_states_that_contradict_the_digests_are_not_published(run):
    run.origin()
    every, before = states(run.now), Ledger(run.store).head()
    for digest, fingerprint, tensors in (
        ("0" * 64, model_fingerprint(every), {}),
        (state_digest(every), "0" * 64, {}),
        (state_digest(every), model_fingerprint(every), {"norm.weight": replace(every["norm.weight"], digest=1)}),
    ):
        for kind in ("origin", "delta"):
            with pytest.raises(IntegrityError):
                run.writer.commit(
                    kind, (1, 1), {**every, **tensors} if kind == "origin" else tensors, digest, fingerprint, [],
                    changed=0, total=TOTAL, codec=None, prompt_cache="all",
                )  # fmt: skip
    assert Ledger(run.store).head() == before


def test_an_invalid_version_is_refused_before_anything_is_written(faulty):
    run = TinyRun(faulty)
    run.origin()
    every = states(run.now)
    faulty.names.clear()
    with pytest.raises(FormatError, match="steps"):
        run.writer.commit(
            "delta", (5, 1), {}, state_digest(every), model_fingerprint(every), [],
            changed=0, total=TOTAL, codec=None, prompt_cache="all",
        )  # fmt: skip
    assert not [name for name in faulty.names if name.startswith(("put", "create"))]


@pytest.mark.parametrize("name", ["a/b", "x" * 65, "a b", ".."])
def test_a_writer_needs_a_name_that_a_key_can_carry(store, name):
    with pytest.raises(FormatError, match="writer"):
        Writer.open(Ledger(store), writer=name)
    assert Ledger(store).epochs() == []


def test_default_writers_differ():
    assert default_writer() != default_writer()
    assert str(os.getpid()) in default_writer()


def test_a_failing_head_does_not_fail_the_commit_and_is_made_up_for(run, monkeypatch):
    run.origin()
    real = run.store.put

    def put(key, data):
        if key == HEAD:
            raise StoreError("HEAD", expected="success", got="a full disk")
        real(key, data)

    monkeypatch.setattr(run.store, "put", put)
    manifest = run.delta()
    assert "a full disk" in str(run.writer.head_error)
    assert Ledger(run.store).head() == manifest
    monkeypatch.setattr(run.store, "put", real)
    run.delta()
    assert run.writer.head_error is None


def arm_at_create(faulty, run, fault):
    """Fail at the next commit's manifest write, found by a rehearsal elsewhere."""
    rehearsal = FaultyStore(type(faulty.inner)("rehearsal"))
    other = TinyRun(rehearsal)
    other.origin()
    rehearsal.names.clear()
    other.delta()
    rehearsal.inner.clear()
    calls = [name.partition("/")[0] for name in rehearsal.names]
    faulty.arm(calls.index("create manifests"), fault)


def test_a_lost_answer_is_read_back(faulty):
    run = TinyRun(faulty)
    run.origin()
    arm_at_create(faulty, run, "lose")
    manifest = run.delta()
    assert faulty.fault is None
    assert (manifest.version, manifest.epoch) == (2, 1)
    assert Ledger(faulty.inner).head() == manifest


def lose_answer_and_read_back(faulty, run, monkeypatch):
    """The manifest lands, but neither the answer nor the reading back arrives: nobody knows."""
    real = faulty.get

    def get(key, *, max_bytes):
        if key.startswith("manifests/") and faulty.fault is None:
            raise StoreError(f"get {key}", expected="success", got="network down")
        return real(key, max_bytes=max_bytes)

    arm_at_create(faulty, run, "lose")
    monkeypatch.setattr(faulty, "get", get)
    after = changed(run.now, 50)
    with pytest.raises(StoreError):
        commit_delta(run.writer, run.now, after)
    monkeypatch.undo()
    return after


def test_the_same_commit_again_adopts_what_an_unanswered_one_wrote(faulty, monkeypatch):
    run = TinyRun(faulty)
    run.origin()
    after = lose_answer_and_read_back(faulty, run, monkeypatch)
    landed = Ledger(faulty.inner).head()
    manifest = commit_delta(run.writer, run.now, after)
    assert manifest == landed
    assert (manifest.version, manifest.epoch) == (2, 1)


def test_another_commit_takes_over_what_an_unanswered_one_wrote(faulty, monkeypatch):
    run = TinyRun(faulty)
    run.origin()
    lose_answer_and_read_back(faulty, run, monkeypatch)
    landed = Ledger(faulty.inner).head()
    manifest = run.delta()
    assert (landed.version, landed.epoch) == (2, 1)
    assert (manifest.version, manifest.epoch, run.writer.epoch) == (2, 2, 2)
    assert Ledger(faulty.inner).head() == manifest
    later = run.delta()
    run.check(Ledger(faulty.inner).plan(None, states_digest(first_bits())), first_bits())
    assert Ledger(faulty.inner).ancestors(later, 1)[0] == manifest


def states_digest(bits):
    return state_digest(states(bits))


def test_a_torn_manifest_of_an_unanswered_commit_is_taken_over(faulty, monkeypatch):
    run = TinyRun(faulty)
    run.origin()
    lose_answer_and_read_back(faulty, run, monkeypatch)
    landed = Ledger(faulty.inner).head()
    faulty.inner.put(landed.key, b'{"torn')
    manifest = run.delta()
    assert (manifest.version, manifest.epoch) == (2, 2)
    assert Ledger(faulty.inner).head() == manifest


def test_a_claim_whose_answer_was_lost_is_still_ours(faulty, monkeypatch):
    """Taking over claims an epoch; when that write's answer is lost, the next attempt must know its own claim."""
    run = TinyRun(faulty)
    run.origin()
    lose_answer_and_read_back(faulty, run, monkeypatch)
    real = faulty.inner.create

    def create(key, data):
        real(key, data)
        if key.startswith("epochs/"):
            monkeypatch.setattr(faulty.inner, "get", broken)
            raise StoreError("create", expected="success", got="no answer")

    real_get = faulty.inner.get

    def broken(key, *, max_bytes):
        if key.startswith("epochs/"):
            raise StoreError("get", expected="success", got="no answer")
        return real_get(key, max_bytes=max_bytes)

    monkeypatch.setattr(faulty.inner, "create", create)
    with pytest.raises(StoreError):
        run.delta()
    monkeypatch.undo()
    manifest = run.delta()
    assert (manifest.version, manifest.epoch) == (2, 2)
    assert Ledger(faulty.inner).head() == manifest


def test_a_claim_whose_answer_was_lost_loses_to_a_rival(faulty, monkeypatch):
    run = TinyRun(faulty)
    run.origin()
    lose_answer_and_read_back(faulty, run, monkeypatch)
    rival = Writer.open(Ledger(faulty.inner))
    with pytest.raises(ConflictError, match=rival.writer):
        run.delta()


# --- anchors and healing


def test_republishing_heals_a_damaged_object(run):
    before = run.origin()
    manifest = run.delta()
    ref = manifest.objects[0]
    data = run.store.get(ref.key, max_bytes=ref.size)
    run.store.put(ref.key, data[:-1] + b"?")
    with pytest.raises(IntegrityError, match="sha256 of object"):
        Ledger(run.store).read_object(ref)
    run.store.put(ref.key, data[:-1])
    with pytest.raises(IntegrityError, match="size of object"):
        Ledger(run.store).read_object(ref)
    run.store.put(ref.key, data + b"?")
    with pytest.raises(IntegrityError, match="size of object"):
        Ledger(run.store).read_object(ref)
    run.store.delete(ref.key)
    with pytest.raises(NotFoundError):
        Ledger(run.store).read_object(ref)
    run.writer.republish(manifest, [data])
    run.check(Ledger(run.store).plan(None, before.state_digest), run.bits[before.sha256])
    for wrong in ([], [data, data], [data + b"?"]):
        with pytest.raises(IntegrityError):
            run.writer.republish(manifest, wrong)


def test_an_anchor_must_be_of_its_version(run):
    manifest = run.origin()
    with pytest.raises(IntegrityError, match="anchor of version 1"):
        run.writer.attach_anchor(manifest, {"model.safetensors": b""}, states(first_bits(seed=3)))
    for files in ({}, {"config.json": b"{}"}, {"model.safetensors": b"", "anchor.json": b""}):
        with pytest.raises(FormatError):
            run.writer.attach_anchor(manifest, files, states(run.now))
    with pytest.raises(FormatError, match="store key"):
        run.writer.attach_anchor(manifest, {"../model.safetensors": b""}, states(run.now))
    assert Ledger(run.store).anchors() == []


def test_attaching_again_heals_and_leaves_no_leftovers(run, tmp_path):
    manifest = run.origin()
    attach(run.writer, manifest, run.now, tmp_path / "many", shard_bytes=10)
    folder = anchor_folder(1, 1)
    assert len([info for info in run.store.list(folder) if info.key.endswith(".safetensors")]) == len(SHAPES)
    shard = next(info.key for info in run.store.list(folder) if info.key.endswith("00002-of-00003.safetensors"))
    run.store.put(shard, b"damaged")
    record = Ledger(run.store).anchor(manifest)
    with pytest.raises(IntegrityError):
        list(iter_anchor_tensors(Ledger(run.store), record))
    attach(run.writer, manifest, run.now, tmp_path / "again", shard_bytes=10)
    assert Ledger(run.store).anchor(manifest) == record
    assert len(list(iter_anchor_tensors(Ledger(run.store), record))) == len(SHAPES)
    attach(run.writer, manifest, run.now, tmp_path / "one")
    names = [info.key.removeprefix(folder) for info in run.store.list(folder)]
    assert names == ["anchor.json", "config.json", "model.safetensors"]


@pytest.mark.parametrize("replacing", [False, True])
@pytest.mark.parametrize("fault", ["die before", "die after"])
def test_an_interrupted_anchor_is_no_anchor(memory, tmp_path, fault, replacing):
    """Whatever call the trainer dies at, a reader finds no anchor, a complete one, or notices."""
    for call in range(20):
        memory.clear()
        faulty = FaultyStore(memory)
        run = TinyRun(faulty)
        manifest = run.origin()
        if replacing:
            attach(run.writer, manifest, run.now, tmp_path / f"first-{call}", shard_bytes=10)
        faulty.arm(call, fault)
        with contextlib.suppress(Died):
            attach(run.writer, manifest, run.now, tmp_path / f"second-{call}")
        record = Ledger(memory).anchor(manifest)
        if record is not None:
            found = {name: bits for name, _, _, bits in iter_anchor_tensors(Ledger(memory), record)}
            assert all((found[name] == run.now[name]).all() for name in SHAPES)
        if faulty.fault is not None:
            break
    assert faulty.fault is not None, "more calls than expected"
    assert record is not None


def test_a_damaged_anchor_record_gives_way_to_an_older_anchor(run, tmp_path):
    older = run.origin()
    run.anchor(tmp_path / "a")
    newer = run.delta()
    run.anchor(tmp_path / "b")
    key = anchor_folder(newer.version, newer.epoch) + "anchor.json"
    good = run.store.get(key, max_bytes=10**9)
    other = run.store.get(anchor_folder(older.version, older.epoch) + "anchor.json", max_bytes=10**9)
    for bad in (good[:-5], b"", good.replace(newer.sha256.encode(), b"0" * 64), other):
        run.store.put(key, bad)
        plan = Ledger(run.store).plan(None, None)
        assert (plan.anchor.version, plan.deltas) == (older.version, (newer,))
        run.check(plan, None)


def test_an_anchor_of_other_tensors_is_no_start(run, tmp_path):
    manifest = run.origin()
    run.anchor(tmp_path)
    record = Ledger(run.store).anchor(manifest)
    wrong = replace(record, tensors={name: replace(state, digest=0) for name, state in record.tensors.items()})
    run.store.put(anchor_folder(1, 1) + "anchor.json", wrong.to_bytes())
    with pytest.raises(IntegrityError, match="state after anchor"):
        Ledger(run.store).plan(None, None)


# --- acknowledgements


def test_acknowledgements(store, caplog):
    ledger = Ledger(store)
    assert ledger.acknowledgements() == {}
    live = Ack("replica-0", 3, "0" * 64, 1, "live", None, None, None, None, 5.0)
    refused = Ack("replica-1", 3, "0" * 64, 1, "refused", 4, "deltas/x", "IntegrityError", "sha256 …", 5.0)
    waiting = Ack("replica-2", None, None, None, "live", None, None, None, None, 5.0)
    for ack in (live, refused, waiting, replace(live, version=4)):
        ledger.acknowledge(ack)
    store.put("replicas/broken.json", b"{")
    store.put("replicas/other.json", live.to_bytes())
    found = ledger.acknowledgements()
    assert found == {"replica-0": replace(live, version=4), "replica-1": refused, "replica-2": waiting}
    assert caplog.text.count("left out acknowledgement") == 2


def test_opening_continues_the_epochs(store):
    assert [Writer.open(Ledger(store), writer="same-name").epoch for _ in range(3)] == [1, 2, 3]
    assert Ledger(store).epochs() == [1, 2, 3]
    writer = Writer.open(Ledger(store), run=None)
    assert commit_origin(writer, first_bits()).epoch == 4


def empty(store):
    for info in list(store.list("")):
        store.delete(info.key)


@pytest.mark.parametrize("another", [False, True])
def test_a_store_that_was_emptied_or_replaced_stops_the_writer(memory, another, tmp_path):
    run = TinyRun(memory)
    manifest = run.origin()
    empty(memory)
    if another:
        Writer.open(Ledger(memory))  # the same epoch number, another run
    with pytest.raises(ConflictError, match=f"got {'writer' if another else 'a store without'}"):
        run.delta()
    with pytest.raises(ConflictError):
        run.anchor(tmp_path, manifest)


def test_a_damaged_claim_of_ours_is_nobody_elses(memory):
    run = TinyRun(memory)
    run.origin()
    memory.put(run.writer.claim.key, b"{")
    assert run.delta().version == 2


@pytest.mark.parametrize("old", [b'"state_digest":"', b'"tensors":{'])
def test_attaching_again_heals_a_damaged_record(memory, old, tmp_path):
    run = TinyRun(memory)
    manifest = run.origin()
    run.anchor(tmp_path, manifest)
    key = anchor_key(manifest.version, manifest.epoch)
    good = memory.get(key, max_bytes=1 << 20)
    at = good.index(old) + len(old)
    memory.put(key, good[:at] + (b"1" if good[at : at + 1] == b"0" else b"0") + good[at + 1 :])
    run.anchor(tmp_path, manifest)
    assert Ledger(memory).plan(None, None).start == "anchor"


def test_an_anchor_that_does_not_fit_leaves_nothing(memory, tmp_path):
    run = TinyRun(memory)
    manifest = run.origin()
    put = memory.put

    def full(key, data):
        if key.startswith("anchors/") and key.endswith("anchor.json"):
            raise StoreError(key, expected="room", got="none")
        put(key, data)

    memory.put = full
    with pytest.raises(StoreError, match="room"):
        run.anchor(tmp_path, manifest)
    assert not list(memory.list("anchors/"))


@pytest.mark.parametrize("what", ["manifest", "head"])
def test_republishing_restores_what_else_of_the_version_is_damaged(memory, what):
    run = TinyRun(memory)
    run.origin()
    manifest = run.delta()
    if what == "manifest":
        memory.put(manifest.key, b"{}")
    else:
        good = memory.get(HEAD, max_bytes=1 << 16)
        memory.put(HEAD, good.replace(manifest.sha256.encode(), b"0" * 64))
    with pytest.raises((ChainError, FormatError, IntegrityError)):
        Ledger(memory).head()
    run.writer.republish(manifest, [memory.get(ref.key, max_bytes=1 << 20) for ref in manifest.objects])
    assert Ledger(memory).head() == manifest
