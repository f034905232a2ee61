"""What the command line says of keys and of runs that are, or are not, signed."""

from __future__ import annotations

import stat
from dataclasses import replace

import pytest
from conftest import Run

from delta_sync.keys import SigningKey
from delta_sync.store.keys import anchor_key, epoch_key

KEY = SigningKey.generate()


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
    assert (code, out) == (1, "")
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


def test_a_key_that_is_none_is_a_problem_with_a_remedy(run, cli):
    code, _, err = cli("verify", run.uri, "--public-key", "ed25519:nonsense")
    assert code == 1
    assert "delta-sync keygen" in err


def test_acknowledgements_are_read_where_they_are(run, tmp_path, as_json):
    elsewhere = Run(tmp_path / "acks")
    elsewhere.acknowledge("east", 6)
    assert as_json("ledger", run.uri)[1]["replicas"] == []
    found = as_json("ledger", run.uri, "--ack-uri", elsewhere.uri)[1]["replicas"]
    assert [replica["replica"] for replica in found] == ["east"]


def test_a_misspelt_ack_uri_is_wrong_usage(run, cli):
    assert cli("ledger", run.uri, "--ack-uri", "s4://bucket/run")[0] == 2
