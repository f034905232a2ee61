"""Deleting old versions by hand: asked first, shown first, and what is left is whole for every other command."""

from __future__ import annotations

import time

import pytest
from typer.testing import CliRunner

from delta_sync.cli.app import app


def files(run):
    return {path.relative_to(run.folder).as_posix() for path in run.folder.rglob("*") if path.is_file()}


def test_what_is_left_of_a_trimmed_run_is_whole(run, as_json, cli, tmp_path):
    before = files(run)
    code, found = as_json("gc", run.uri, "--keep", 1, "--grace", 0, "--yes")
    assert (code, found["first_kept"], found["deleted"], found["orphans"]) == (0, 4, True, 0)
    assert before - files(run) == set(found["keys"]) and len(found["keys"]) == found["objects"] == 7
    assert {"HEAD.json", "epochs/000001.json"} <= files(run)

    code, found = as_json("verify", run.uri)
    assert (code, found["oldest"], found["proven"], found["proven_from"]) == (0, 4, [4, 5, 6], 4)
    text = cli("verify", run.uri)[1]
    assert "from version 4 on" in text and "what was before version 4 is gone" in text

    code, found = as_json("ledger", run.uri)
    assert code == 0 and [version["version"] for version in found["versions"]] == [4, 5, 6]
    assert as_json("materialize", run.uri, tmp_path / "newest")[0] == 0
    assert as_json("materialize", f"{run.uri}@5", tmp_path / "five")[0] == 0
    code, found = as_json("materialize", f"{run.uri}@3", tmp_path / "three")
    assert code == 1 and not (tmp_path / "three").exists()
    assert as_json("gc", run.uri, "--keep", 1, "--grace", 0, "--yes")[1]["objects"] == 0


def test_it_shows_before_it_deletes(run, cli):
    before = files(run)
    code, out, _ = cli("gc", run.uri, "--keep", 1, "--grace", 0, "--dry-run")
    assert code == 0 and "would delete 7 objects of" in out and run.manifests[1].key in out
    assert "versions from 4 on stay, for the anchor of version 4" in out
    assert files(run) == before


@pytest.mark.parametrize("answer, gone", [("y\n", 7), ("n\n", 0), ("", 0)])
def test_it_asks(run, answer, gone):
    before = files(run)
    done = CliRunner().invoke(app, ["gc", run.uri, "--keep", "1", "--grace", "0"], input=answer)
    assert "Delete for good?" in done.output
    assert done.exit_code == (0 if gone else 1)
    assert len(before - files(run)) == gone


def test_where_nobody_can_be_asked_it_wants_to_be_told(run, cli):
    assert cli("gc", run.uri, "--keep", 1, "--json")[0] == 2
    assert cli("gc", run.uri)[0] == 2  # how many to keep is nobody's guess
    assert cli("gc", run.uri, "--keep", 0, "--yes")[0] == 2


def test_the_grace_and_a_replica_hold_versions_back(run, as_json):
    code, found = as_json("gc", run.uri, "--keep", 1, "--dry-run")
    assert (code, found["keys"], found["first_kept"]) == (0, [], None)
    run.acknowledge("frankfurt-0", 2, time=time.time())
    run.acknowledge("oregon-0", 1, time=1.0)
    code, found = as_json("gc", run.uri, "--keep", 1, "--grace", 0, "--yes")
    assert (found["first_kept"], "frankfurt-0" in found["held_by"]) == (2, True)
    assert as_json("verify", run.uri)[0] == 0
