"""What a newcomer names instead of what is meant, and what each command then says."""

from __future__ import annotations

import shutil

import pytest
from helpers.publish import read_checkpoint
from small_run import Run


def flat(text):
    """What was said, whatever the frame that it was drawn in."""
    return " ".join(text.replace("│", " ").split())


@pytest.fixture
def checkpoint(run, cli, tmp_path):
    folder = tmp_path / "checkpoint"
    assert cli("materialize", f"{run.uri}@2", folder)[0] == 0
    return folder


@pytest.fixture
def unanchored(tmp_path):
    """A short run of the default settings: nobody needed an anchor yet."""
    run = Run(tmp_path / "short")
    shutil.rmtree(run.folder / "anchors")
    return run


@pytest.mark.parametrize("command", ["ledger", "watch", "ui", "verify", "reset", "compact", "gc --keep 1", "doctor"])
def test_a_version_where_a_run_is_meant(run, cli, command):
    code, _, err = cli(*command.split(), f"{run.uri}@3")
    assert code == 2
    assert "expected a whole run, got version 3 of one. Remedy: name " in flat(err)
    assert "materialize" in err


@pytest.mark.parametrize("command", ["inspect", "materialize"])
def test_a_version_before_the_first(run, cli, command, tmp_path):
    code, _, err = cli(command, f"{run.uri}@0", *([tmp_path / "out"] if command == "materialize" else []))
    assert code == 1 and "version 0, expected a manifest, got none in the store" in flat(err)


def test_a_version_as_either_side_of_a_mirror(run, cli, tmp_path):
    for words in ([f"{run.uri}@3", tmp_path / "copy"], [run.uri, f"{tmp_path}/copy@3"]):
        code, _, err = cli("mirror", *words, "--once")
        assert code == 2 and "expected a whole run" in flat(err)
    assert not (tmp_path / "copy@3").exists()


def test_a_folder_that_is_named_like_a_version(run, as_json, tmp_path):
    shutil.copytree(run.folder, tmp_path / "run@7")
    for uri in (f"{tmp_path}/run@7", f"{tmp_path}/run@7/"):
        assert as_json("ledger", uri)[1]["newest"] == 6
    assert as_json("inspect", f"{tmp_path}/run@7/@3")[1]["what"].endswith("run@7@3")


def test_a_file_where_a_run_is_meant(run, cli, tmp_path):
    (tmp_path / "notes.txt").write_text("not a run")
    code, _, err = cli("ledger", tmp_path / "notes.txt")
    assert code == 2 and "expected a run's folder or bucket, got a file" in flat(err)


def test_a_checkpoint_where_a_run_is_meant(checkpoint, cli):
    for command in ("ledger", "verify"):
        code, _, err = cli(command, checkpoint)
        assert code == 1 and "got a checkpoint's folder" in err
    code, _, err = cli("ledger", checkpoint / "missing")
    assert code == 1 and "got no such folder. Remedy: check the URI" in err


def test_a_checkpoints_folder_is_inspected(checkpoint, as_json):
    code, found = as_json("inspect", checkpoint)
    assert (code, found["kind"], found["tensors"]) == (0, "weights", 3)


def test_a_run_where_a_checkpoint_is_meant(run, cli):
    code, _, err = cli("diff", f"{run.uri}@2", f"{run.uri}@3")
    assert code == 1
    assert f"checkpoint {run.uri}@2" in err and "delta-sync materialize URI@VERSION DIR" in err


@pytest.mark.parametrize("content", [b"plain text", b"", b"\x05\0\0\0\0\0\0\0{}"])
def test_a_file_that_is_no_delta_is_named(checkpoint, cli, tmp_path, content):
    file = tmp_path / "notes.txt"
    file.write_bytes(content)
    for words in (["inspect", file], ["apply", checkpoint, file, tmp_path / "out"]):
        code, _, err = cli(*words)
        assert code == 1
        assert str(file) in err and "Remedy: name " in err


def test_an_object_that_decodes_to_nonsense_is_named(run, cli, tmp_path):
    wrong = run.publisher.step(9, corrupt="content")
    code, _, err = cli("materialize", run.uri, tmp_path / "out")
    assert code == 1 and f"version {wrong.version}" in err


def test_without_an_anchor_the_model_that_the_run_began_with_will_do(unanchored, cli, as_json, tmp_path):
    run, begin, out = unanchored, tmp_path / "model", tmp_path / "out"
    for words in (["materialize", run.uri, out], ["bench", run.uri]):
        code, _, err = cli(*words)
        assert code == 1
        assert f"version {6 if words[0] == 'materialize' else 5} of file://{run.folder}, expected an anchor" in err
        assert "delta-sync materialize --base CKPT" in err
    whole = Run(tmp_path / "whole")  # of the same weights
    assert cli("materialize", f"{whole.uri}@1", begin)[0] == 0
    (begin / "config.json").write_text("{}")
    code, found = as_json("materialize", f"{run.uri}@5", out, "--base", begin)
    assert (code, found["anchor"], found["base"], found["deltas"]) == (0, None, str(begin), 4)
    assert {name: bits.tobytes() for name, bits in read_checkpoint(out)[0].items()} == run.bits[5]
    assert (out / "config.json").read_text() == "{}"
    code, found = as_json("materialize", run.uri, tmp_path / "on", "--base", out)  # any version's weights will do
    assert (code, found["deltas"]) == (0, 1)
    assert cli("materialize", f"{whole.uri}@2", tmp_path / "other")[0] == 0
    code, _, err = cli("materialize", f"{run.uri}@1", tmp_path / "none", "--base", tmp_path / "other")
    assert code == 1 and f"weights of {tmp_path / 'other'}, expected those of a version that deltas lead from" in err


def test_a_base_leads_past_a_damaged_anchor(run, cli, as_json, checkpoint, tmp_path):
    run.damage("anchors/000000000004-000001/model.safetensors")
    code, _, err = cli("materialize", run.uri, tmp_path / "around")  # by the older anchor
    assert code == 0 and "anchors/000000000004-000001" in err
    code, found = as_json("materialize", run.uri, tmp_path / "out", "--base", checkpoint)
    assert (code, found["deltas"]) == (0, 4)
    assert {name: bits.tobytes() for name, bits in read_checkpoint(tmp_path / "out")[0].items()} == run.bits[6]
