"""What the command line says of keys and of runs that are, or are not, signed."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest
from helpers.publish import Publisher
from small_run import Run

from delta_sync.cli.weights import weights_after
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.signing import PublicKeys
from delta_sync.store import LocalStore
from delta_sync.store.keys import anchor_key, epoch_key, fold_key

KEY, OTHER = SigningKey.generate(), SigningKey.generate()


@pytest.fixture
def signed(tmp_path):
    return Run(tmp_path / "signed", key=KEY)


def test_keygen_makes_a_pair_and_never_overwrites(tmp_path, cli, as_json):
    path = tmp_path / "run.key"
    code, found = as_json("keygen", path)
    assert code == 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (tmp_path / "run.key.pub").read_text().strip() == found["text"]
    before = path.read_bytes()
    code, out, err = cli("keygen", path)
    assert (code, out) == (2, "")
    assert "exists" in err
    assert path.read_bytes() == before
    assert before.splitlines()[1].decode() not in cli("keygen", tmp_path / "other.key")[1]


def test_a_signed_run_verifies_with_its_key_and_says_so(signed, cli, as_json):
    code, out, _ = cli("verify", signed.uri, "--public-key", KEY.public.text)
    assert code == 0
    assert f"signatures checked against {KEY.id}" in out
    code, found = as_json("ledger", signed.uri, "--public-key", KEY.public.text)
    assert (code, {version["signed_by"] for version in found["versions"]}) == (0, {KEY.id})
    assert KEY.id in cli("ledger", signed.uri)[1]


def test_an_unsigned_run_does_not_verify_with_a_key(run, cli):
    code, _, err = cli("verify", run.uri, "--public-key", KEY.public.text)
    assert code == 1
    assert "unsigned" in err
    assert cli("verify", run.uri)[0] == 0
    assert "signed by" not in cli("ledger", run.uri)[1]


def test_unsigned_anchors_and_claims_are_damage_too(signed, as_json):
    store, head = signed.publisher.ledger.store, signed.manifests[4]
    record = signed.publisher.ledger.anchor(head)
    store.put(anchor_key(4, 1), replace(record, signature=None).to_bytes())
    store.put(epoch_key(1), replace(signed.publisher.ledger.epoch(1), signature=None).to_bytes())
    assert as_json("verify", signed.uri)[0] == 0
    code, found = as_json("verify", signed.uri, "--public-key", KEY.public.text)
    assert code == 1
    assert [damage["object"] for damage in found["damage"]] == [anchor_key(4, 1), epoch_key(1)]


def test_a_checkpoint_is_made_only_of_what_the_key_signed(signed, run, tmp_path, cli):
    assert cli("materialize", signed.uri, tmp_path / "one", "--public-key", KEY.public.text)[0] == 0
    code, _, err = cli("materialize", run.uri, tmp_path / "two", "--public-key", KEY.public.text)
    assert (code, "unsigned" in err, (tmp_path / "two").exists()) == (1, True, False)


def test_a_key_that_is_none_is_wrong_usage_with_a_remedy(run, cli):
    code, _, err = cli("verify", run.uri, "--public-key", "ed25519:nonsense")
    assert code == 2
    assert "delta-sync keygen" in err


def test_acknowledgements_are_read_where_they_are(run, tmp_path, as_json):
    elsewhere = Run(tmp_path / "acks")
    elsewhere.acknowledge("east", 6)
    assert as_json("ledger", run.uri)[1]["replicas"] == []
    found = as_json("ledger", run.uri, "--ack-uri", elsewhere.uri)[1]["replicas"]
    assert [replica["replica"] for replica in found] == ["east"]


def test_a_misspelt_ack_uri_is_wrong_usage(run, cli):
    assert cli("ledger", run.uri, "--ack-uri", "s4://bucket/run")[0] == 2


def rotated(signed):
    """The run goes on with another key: an origin with an anchor, and three deltas."""
    signed.publisher = Publisher(signed.uri, signed.publisher.weights, key=OTHER)
    signed.keep(signed.publisher.origin(anchor=True))
    for seed in range(10, 13):
        signed.keep(signed.publisher.step(seed))


def test_after_a_rotation_versions_of_the_old_key_need_it(signed, cli, as_json, tmp_path):
    rotated(signed)
    new, both = ("--public-key", OTHER.public.text), ("--public-key", f"{OTHER.public.text},{KEY.public.text}")
    code, found = as_json("verify", signed.uri, *new)
    assert (code, found["oldest"], found["proven"]) == (1, 7, [7, 8, 9, 10])
    (damage,) = found["damage"]
    assert damage["object"] == "manifest of version 6" and "pin that key too" in damage["remedy"]
    assert cli("verify", signed.uri, *both)[0] == 0
    assert cli("gc", signed.uri, "--keep", "1", "--grace", "0", "--yes", *new)[0] == 0
    assert cli("verify", signed.uri, *new)[0] == 0
    assert cli("materialize", signed.uri, tmp_path / "checkpoint", *new)[0] == 0


def test_an_anchor_that_no_pinned_key_signed_pushes_none_out(signed, as_json):
    unsigned = Publisher(signed.uri, signed.publisher.weights)
    unsigned.anchor(signed.manifests[6])
    words = ("gc", signed.uri, "--keep", "1", "--grace", "0", "--dry-run")
    assert as_json(*words)[1]["first_kept"] == 6
    assert as_json(*words, "--public-key", KEY.public.text)[1]["first_kept"] == 4


def check_route(run, route):
    """Which steps a reader at version 4 that pins the key takes; they lead to the very bits."""
    ledger = Ledger(LocalStore(run.folder), keys=PublicKeys([KEY.public]))
    plan = ledger.plan(Position(4, run.manifests[4].sha256), None)
    assert [(step.base_version, step.version) for step in plan.deltas] == route
    found = weights_after(ledger, ledger.plan(None, None)).bits
    assert {name: bits.tobytes() for name, bits in found.items()} == run.bits[6]


def test_a_signed_fold_is_taken_and_others_are_left_out_for_the_deltas(signed, cli, tmp_path):
    KEY.save(tmp_path / "trainer")
    OTHER.save(tmp_path / "other")
    code, out, _ = cli("compact", signed.uri)
    assert (code, "leave it out" in out) == (0, True)
    check_route(signed, [(4, 5), (5, 6)])
    assert cli("compact", signed.uri, "--signing-key", tmp_path / "other")[0] == 0
    check_route(signed, [(4, 5), (5, 6)])
    code, out, _ = cli("compact", signed.uri, "--signing-key", tmp_path / "trainer")
    assert (code, "leave it out" in out) == (0, False)
    check_route(signed, [(4, 6)])
    store = LocalStore(signed.folder)
    record = Ledger(store).fold(signed.manifests[6], 4)
    store.put(fold_key(6, 1, 4), replace(record, created_at=record.created_at + 1).to_bytes())
    check_route(signed, [(4, 5), (5, 6)])
