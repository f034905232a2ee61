"""Signatures over a run's records: what is signed, and what a reader that pins keys refuses."""

import json
import logging
import pickle
import uuid
from dataclasses import replace

import pytest
from tiny_run import TinyRun, commit_origin, first_bits

from delta_sync.errors import ChainError, DeltaSyncError, FormatError, SignatureError
from delta_sync.keys import PublicKey, SigningKey
from delta_sync.ledger import Ledger
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.plan import Position
from delta_sync.records import Epoch, Head, read_epoch
from delta_sync.signing import PublicKeys, load_public_keys, load_signing_key, sign
from delta_sync.store.keys import HEAD, anchor_key, epoch_key
from delta_sync.store.memory import MemoryStore
from delta_sync.strict_json import dumps
from delta_sync.writer import Writer

KEY, OTHER = SigningKey.generate(), SigningKey.generate()


def pinned(*keys):
    return PublicKeys(key.public for key in keys or (KEY,))


@pytest.fixture
def store():
    return MemoryStore(uuid.uuid4().hex)


def signed_run(store, key=KEY, deltas=2):
    run = TinyRun(store, key=key)
    run.origin()
    for _ in range(deltas):
        run.delta()
    return run


def reader(store, *keys):
    return Ledger(store, keys=pinned(*keys), relist_seconds=0)


def get(store, key):
    return store.get(key, max_bytes=1 << 20)


def raised(store, *keys):
    with pytest.raises(SignatureError) as error:
        reader(store, *keys).head()
    return str(error.value)


# --- a signed run


def test_every_record_is_signed_and_the_run_reads(store, tmp_path):
    run = signed_run(store)
    run.anchor(tmp_path / "anchor")
    head = run.writer.head
    ledger = reader(store)
    assert ledger.head() == head and head.signature.key == KEY.id
    assert ledger.anchor(head).signature.key == KEY.id
    assert read_epoch(store, 1, pinned()).signature.key == KEY.id
    pinned().check(Head, get(store, HEAD), HEAD)
    run.check(ledger.plan(None, None), None)


def test_readers_without_keys_take_signed_runs(store):
    run = signed_run(store)
    assert Ledger(store).head() == run.writer.head
    assert Manifest.from_bytes(run.writer.head.to_bytes()) == run.writer.head


def test_unsigned_records_have_no_signature_field(store):
    run = signed_run(store, key=None)
    assert all(b"signature" not in get(store, key) for key in (HEAD, epoch_key(1), run.writer.head.key))


def test_an_anchor_put_again_is_the_same_anchor(store, tmp_path):
    run = signed_run(store)
    run.anchor(tmp_path / "one")
    before = get(store, anchor_key(3, 1))
    run.anchor(tmp_path / "two")
    assert get(store, anchor_key(3, 1)) == before


def test_a_lost_answer_is_settled_with_a_signature(store):
    """The manifest was written, the answer lost: a second commit finds it, though its time differs."""
    run = signed_run(store)
    twin = Writer(Ledger(store), run.writer.claim, *run_before(run), KEY)
    again = commit_delta_of(twin, run)
    assert again == run.writer.head


def run_before(run):
    parent = Ledger(run.store).parent(run.writer.head)
    return parent, Position(parent.version, parent.sha256)


def commit_delta_of(writer, run):
    head = run.writer.head
    data = [get(run.store, ref.key) for ref in head.objects]
    return writer.commit(
        "delta", head.steps, head.tensors, head.state_digest, head.model_fingerprint, data,
        changed=head.changed_elements, total=head.total_elements, codec=head.codec, prompt_cache=head.prompt_cache,
    )  # fmt: skip


# --- what is refused


def test_an_unsigned_run_is_refused_with_what_to_do(store):
    signed_run(store, key=None)
    message = raised(store)
    assert (
        f"expected a record signed with a pinned key ({KEY.id}), got an unsigned one. Remedy: set signing_key"
        in message
    )
    assert "manifests/000000000003-000001-" in message


def test_another_key_is_refused_and_named(store):
    signed_run(store, OTHER)
    assert f"got one signed with key {OTHER.id}" in raised(store)


def test_a_key_id_alone_convinces_nobody(store):
    head = signed_run(store, OTHER).writer.head
    claimed = replace(head, signature=replace(head.signature, key=KEY.id))
    store.put(head.key, claimed.to_bytes())
    assert f"a signature of key {KEY.id} that is not this manifest's" in raised(store)


def leaves(value, path=()):
    """The paths of everything in a JSON document that is not a container."""
    if isinstance(value, dict | list) and value:
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return [leaf for name, inner in pairs for leaf in leaves(inner, (*path, name))]
    return [path]


def altered(document, path):
    """A copy in which one value is another of its kind."""
    copy = json.loads(json.dumps(document))
    inner = copy
    for name in path[:-1]:
        inner = inner[name]
    old = inner[path[-1]]
    inner[path[-1]] = old + 1 if isinstance(old, int | float) else (old[:-1] + "01"[old[-1:] == "0"] if old else 1)
    return copy


@pytest.mark.parametrize("record", [Manifest, AnchorRecord, Epoch, Head])
def test_no_value_can_be_changed(store, tmp_path, record):
    run = signed_run(store)
    run.anchor(tmp_path / "anchor")
    head = run.writer.head
    key = {Manifest: head.key, AnchorRecord: anchor_key(3, 1), Epoch: epoch_key(1), Head: HEAD}[record]
    document = json.loads(get(store, key))
    pinned().check(record, dumps(document), key)
    paths = leaves(document)
    assert len(paths) > 6
    for path in paths:
        with pytest.raises(FormatError):
            pinned().check(record, dumps(altered(document, path)), key)
    for more in ({**document, "extra": 1}, {name: document[name] for name in document if name != "epoch"}):
        with pytest.raises(SignatureError):
            pinned().check(record, dumps(more), key)


def test_every_bit_of_a_signature_counts(store):
    data = signed_run(store).writer.head.to_bytes()
    start = data.index(b'"value":"') + len(b'"value":"')
    for at in range(start, start + 128):
        flipped = bytearray(data)
        flipped[at : at + 1] = b"1" if data[at : at + 1] == b"0" else b"0"
        with pytest.raises(SignatureError, match="that is not this manifest's"):
            pinned().check(Manifest, bytes(flipped), "m")


def test_a_misshapen_signature_is_refused_even_without_keys(store):
    head = signed_run(store).writer.head
    document = json.loads(head.to_bytes())
    for wrong in (None, {}, [], "x", {"key": "g" * 16, "value": "0" * 128}, {"key": KEY.id, "value": "0" * 127}):
        with pytest.raises(FormatError, match="signature"):
            Manifest.from_bytes(dumps({**document, "signature": wrong}))


def test_a_signature_is_for_one_kind_of_record():
    """The same JSON, signed as a claim, is no HEAD: the kind is part of what is signed."""
    claim = sign(Epoch("run", 1, "me", 0.5), KEY)
    pinned().check(Epoch, claim.to_bytes(), "claim")
    with pytest.raises(SignatureError, match="that is not this head's"):
        pinned().check(Head, claim.to_bytes(), "HEAD.json")


def test_a_signature_of_another_version_is_none(store):
    run = signed_run(store)
    head, parent = run.writer.head, Ledger(store).parent(run.writer.head)
    store.put(head.key, replace(head, signature=parent.signature).to_bytes())
    store.delete(HEAD)
    assert "that is not this manifest's" in raised(store)


# --- replays: a record with a valid signature in a place that is not its own


def test_a_manifest_under_another_key_is_refused(store):
    run = signed_run(store)
    old = Ledger(store).parent(run.writer.head)
    forged = old.key.replace("000000000002", "000000000004")
    store.put(forged, old.to_bytes())
    with pytest.raises(DeltaSyncError, match="key of a manifest"):
        reader(store).head()


def test_a_claim_under_another_key_is_refused(store):
    signed_run(store)
    store.put(epoch_key(2), get(store, epoch_key(1)))
    with pytest.raises(DeltaSyncError, match=r"key of epochs/000002\.json"):
        read_epoch(store, 2, pinned())


def test_an_anchor_of_another_version_is_refused(store, tmp_path):
    run = signed_run(store)
    run.anchor(tmp_path / "anchor")
    run.delta()
    store.put(anchor_key(4, 1), get(store, anchor_key(3, 1)))
    with pytest.raises(DeltaSyncError):
        reader(store).anchor(run.writer.head)


def test_an_older_head_moves_nobody_back(store):
    run = signed_run(store)
    old = get(store, HEAD)
    ledger = reader(store)
    run.delta()
    assert ledger.head().version == 4
    store.put(HEAD, old)
    assert ledger.head().version == 4
    assert reader(store).head().version == 4


def test_another_run_of_the_same_key_is_not_taken_for_this_one(store):
    run, elsewhere = signed_run(store), MemoryStore("elsewhere")
    other = signed_run(elsewhere, deltas=0)
    for _ in range(2):  # a later epoch, a higher version
        other = TinyRun(elsewhere, key=KEY)
        other.origin()
        for _ in range(4):
            other.delta()
    ledger = reader(store)
    assert ledger.head() == run.writer.head
    for info in [*elsewhere.list("manifests/"), *elsewhere.list("epochs/")]:
        if not info.key.startswith("epochs/000001"):
            store.put(info.key, get(elsewhere, info.key))
    with pytest.raises(DeltaSyncError, match=f"expected a version of run {run.writer.run}"):
        ledger.head()


def test_a_forged_fork_beside_the_chain_is_refused(store):
    """Whoever can write but not sign cannot lead a reader away, by HEAD, by a claim, or by a higher epoch."""
    run = signed_run(store)
    ledger = reader(store)
    ledger.head()
    intruder = TinyRun(store, writer="intruder", key=None)
    intruder.origin()
    intruder.delta()
    with pytest.raises(SignatureError, match="unsigned"):
        ledger.head()
    with pytest.raises(SignatureError, match="unsigned"):
        reader(store).head()
    assert run.writer.head.version == 3


def test_a_damaged_hint_is_no_hint(store):
    run = signed_run(store)
    store.put(HEAD, replace(Head.from_bytes(get(store, HEAD)), manifest="0" * 64, signature=None).to_bytes())
    assert reader(store).head() == run.writer.head


# --- keys come and go


def test_rotation(store, tmp_path):
    """Old and new pinned: the chain reads through; only the new one: what is signed with it and begins at an anchor."""
    run = signed_run(store)
    follower = Ledger(store, keys=pinned(KEY, OTHER))
    before = follower.head()
    after = TinyRun(store, key=OTHER)
    after.writer.ledger.keys = None
    after.origin(run.now)
    after.delta()
    assert follower.head() == after.writer.head
    plan = follower.plan(Position(before.version, before.sha256), None)
    assert plan.start == "position" and [m.version for m in plan.deltas] == [5]
    strict = reader(store, OTHER)
    with pytest.raises(ChainError, match="attach an anchor"):
        strict.plan(None, None)
    after.anchor(tmp_path / "anchor")
    after.check(strict.plan(None, None), None)


def test_a_trainer_that_begins_to_sign_starts_a_chain_of_its_own(store, caplog):
    signed_run(store, key=None)
    with caplog.at_level(logging.WARNING):
        writer = Writer.open(Ledger(store, keys=pinned()), key=KEY)
    assert "unsigned" in caplog.text
    assert (writer.previous, writer.next_version) == (None, 4)
    commit_origin(writer, first_bits())
    assert reader(store).head() == writer.head


def test_a_trainer_that_resumes_checks_what_it_continues(store):
    run = signed_run(store)
    head = run.writer.head
    assert Writer.open(Ledger(store, keys=pinned()), key=KEY).previous == head
    store.put(head.key, replace(head, steps=(9, 9)).to_bytes())
    store.delete(HEAD)
    assert Writer.open(Ledger(store, keys=pinned()), key=KEY).previous is None


# --- key files


def test_keys_are_saved_and_loaded(tmp_path):
    path = tmp_path / "run.key"
    public = KEY.save(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert public == tmp_path / "run.key.pub"
    assert load_signing_key(str(path)).id == load_signing_key(path.read_text()).id == KEY.id
    assert load_public_keys([str(public)]).ids == load_public_keys([public.read_text()]).ids == (KEY.id,)
    assert load_public_keys([f"{KEY.public.text},{OTHER.public.text}"]).ids == tuple(sorted((KEY.id, OTHER.id)))
    assert load_public_keys([]) is None


def test_a_key_is_never_overwritten(tmp_path):
    path = tmp_path / "run.key"
    KEY.save(path)
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    (tmp_path / "run.key.pub").unlink()
    with pytest.raises(FileExistsError):
        OTHER.save(path)
    assert load_signing_key(str(path)).id == KEY.id
    assert not (tmp_path / "run.key.pub").exists()


def test_a_key_that_others_can_read_is_warned_of(tmp_path, caplog):
    path = tmp_path / "run.key"
    KEY.save(path)
    load_signing_key(str(path))
    assert caplog.text == ""
    path.chmod(0o640)
    load_signing_key(str(path))
    assert "chmod 600" in caplog.text


def test_openssl_s_public_keys_are_read(tmp_path):
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    pem = KEY.public._key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    assert PublicKey.load(pem).id == KEY.id


@pytest.mark.parametrize("source", ["", "/nowhere/key", "ed25519:", "ed25519:AAAA", "ed25519:" + "!" * 44, "a\0b",
                                    "-----BEGIN PUBLIC KEY-----\nAAAA\n-----END PUBLIC KEY-----"])  # fmt: skip
def test_a_public_key_that_is_none_is_refused(source):
    with pytest.raises(DeltaSyncError, match="delta-sync keygen"):
        PublicKey.load(source)


def test_a_secret_is_in_no_message(tmp_path):
    path = tmp_path / "run.key"
    KEY.save(path)
    secret = path.read_text().splitlines()[1]
    damaged = "-----BEGIN PRIVATE KEY-----\n" + secret[:-4] + "\n-----END PRIVATE KEY-----"
    for source in (damaged, secret):
        with pytest.raises(DeltaSyncError) as error:
            load_signing_key(source)
        assert secret[:10] not in str(error.value)
    assert repr(KEY) == f"SigningKey({KEY.id})"
    with pytest.raises(TypeError):
        pickle.dumps(KEY)
