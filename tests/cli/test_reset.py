"""A reset: nothing is deleted, no reader is moved, and whoever publishes next begins a chain with complete weights."""

from __future__ import annotations

import pytest
from helpers.publish import Publisher
from small_run import Run
from typer.testing import CliRunner

from delta_sync.cli.app import app
from delta_sync.errors import ConflictError, ResetError
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.records import Epoch
from delta_sync.signing import generate_signing_key
from delta_sync.store.open import open_store
from delta_sync.writer import Writer


def files(run):
    return {path.relative_to(run.folder).as_posix(): path.read_bytes() for path in run.folder.rglob("*.*")}


def test_it_adds_a_claim_and_nothing_else(run, as_json):
    before = files(run)
    reader = Ledger(open_store(run.uri))
    seen = reader.head()
    code, found = as_json("reset", run.uri, "--yes")
    assert (code, found["reset"], found["newest"], found["epoch"]) == (0, True, 6, 2)
    after = files(run)
    assert after.keys() - before.keys() == {"epochs/000002.json"}
    assert {key: after[key] for key in before} == before
    assert reader.head() == seen and Ledger(open_store(run.uri)).head() == seen
    assert as_json("verify", run.uri)[0] == 0
    code, found = as_json("reset", run.uri, "--yes")
    assert (code, found["reset"], found["pending_before"]) == (0, False, True)
    assert files(run) == after


def test_a_dry_run_and_a_no_write_nothing(run, cli, as_json):
    before = files(run)
    code, out, _ = cli("reset", run.uri, "--dry-run")
    assert code == 0 and out.startswith("would reset") and "after version 6" in out
    done = CliRunner().invoke(app, ["reset", run.uri], input="n\n")
    assert done.exit_code == 1 and "Forget the chain?" in done.output
    assert cli("reset", run.uri, "--json")[0] == 2  # nobody can be asked
    assert files(run) == before


def test_no_run_no_reset(tmp_path, as_json):
    code, found = as_json("reset", tmp_path, "--yes")
    assert code == 1 and "at least one epoch" in found["error"]["message"]


def test_the_writer_at_work_is_told_and_goes_on_with_an_origin(run, cli):
    reader = Ledger(open_store(run.uri))
    serving = Position(6, run.manifests[6].sha256)
    assert cli("reset", run.uri, "--yes")[0] == 0
    with pytest.raises(ResetError):
        run.publisher.step(50)
    assert reader.head().version == 6
    run.publisher.writer = Writer.open(run.publisher.ledger)
    assert run.publisher.writer.after_reset
    origin = run.publisher.origin(anchor=True)
    assert (origin.version, origin.epoch, origin.parent) == (7, 3, run.manifests[6].sha256)
    last = run.publisher.step(51)
    plan = reader.plan(serving, None)  # its bits are not the origin's: it takes the complete weights
    assert plan.target == last and plan.anchor is not None and plan.anchor.version == 7
    assert not Writer.open(Ledger(open_store(run.uri))).after_reset  # the origin answered it


def test_behind_a_reset_another_trainer_goes_first(run, cli):
    cli("reset", run.uri, "--yes")
    other = Publisher(run.uri, run.publisher.weights)
    assert other.writer.epoch == 3 and other.writer.after_reset
    with pytest.raises(ConflictError, match="second publisher") as caught:
        run.publisher.step(50)
    assert not isinstance(caught.value, ResetError)
    assert other.origin(anchor=True).version == 7


def test_a_trainer_that_died_before_its_origin_leaves_the_reset_to_the_next(run, cli):
    cli("reset", run.uri, "--yes")
    Writer.open(Ledger(open_store(run.uri)))
    assert Writer.open(Ledger(open_store(run.uri))).after_reset


def test_a_signed_run_is_reset_with_its_key_alone(tmp_path, as_json, cli):
    key = generate_signing_key()
    key.save(tmp_path / "run.key")
    run = Run(tmp_path / "signed", key=key)
    for said in ("--yes", "--dry-run"):
        code, found = as_json("reset", run.uri, said)
        assert (code, found["error"]["kind"]) == (1, "SignatureError")
    generate_signing_key().save(tmp_path / "other.key")
    code, found = as_json("reset", run.uri, "--yes", "--signing-key", tmp_path / "other.key")
    assert (code, found["error"]["kind"]) == (1, "SignatureError")
    assert "which signed no epoch of this run" in found["error"]["message"]
    code, out, _ = cli("compact", run.uri, "--dry-run", "--signing-key", tmp_path / "other.key")
    assert code == 0
    assert f"not signed with the run's key {key.id}" in out
    code, found = as_json("reset", run.uri, "--yes", "--signing-key", tmp_path / "run.key")
    assert (code, found["epoch"]) == (0, 2)
    claim = Epoch.from_bytes((run.folder / "epochs/000002.json").read_bytes())
    assert claim.reset and claim.signature.key == key.id
    assert cli("verify", run.uri, "--public-key", key.public.text)[0] == 0


def test_a_trainers_claim_reads_as_ever(run):
    data = (run.folder / "epochs/000001.json").read_bytes()
    assert b"reset" not in data and not Epoch.from_bytes(data).reset
    text = b'{"created_at":1.5,"epoch":2,"format_version":1,"reset":true,"run":"r","writer":"w"}'
    assert Epoch.from_bytes(text) == Epoch("r", 2, "w", 1.5, reset=True) and Epoch.from_bytes(text).to_bytes() == text


def test_a_run_that_was_reset_long_ago_can_be_reset_again_when_its_newest_version_is_damaged(run, as_json, cli):
    cli("reset", run.uri, "--yes")
    run.publisher.writer = Writer.open(Ledger(open_store(run.uri)))
    newest = run.publisher.origin(anchor=True)
    run.damage(newest.key)
    code, found = as_json("reset", run.uri, "--yes")
    assert (code, found["reset"], found["newest"], found["epoch"]) == (0, True, None, 4)
