"""``delta-sync mirror``: what it copies, says and exits with; as a process that is killed, stopped and held up."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from helpers.child import child

from delta_sync.cli.report import gist
from delta_sync.ledger import Ledger
from delta_sync.store import LocalStore

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
MIRROR = [sys.executable, "-m", "delta_sync.cli", "mirror"]


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache-home"))


def versions(folder):
    head = Ledger(LocalStore(folder)).head()
    return head.version if head else None


def files(folder):
    """Everything of the run in a folder; acknowledgements are their bucket's."""
    found = {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {key: data for key, data in found.items() if not key.startswith("replicas/")}


def until(what, seconds=60.0):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, "not within a minute"
        time.sleep(0.05)


def test_a_dry_run_says_what_is_lacking_and_copies_nothing(run, tmp_path, as_json):
    code, found = as_json("mirror", run.uri, tmp_path / "a", "--dry-run")
    [row] = found["destinations"]
    assert (code, row["result"], row["objects"] > 10) == (0, "would copy", True)
    assert not (tmp_path / "a").exists() or not files(tmp_path / "a")
    assert as_json("mirror", run.uri, tmp_path / "a", "--once")[0] == 0
    assert as_json("mirror", run.uri, tmp_path / "a", "--dry-run")[1]["destinations"][0]["result"] == "nothing to copy"
    as_json("reset", tmp_path / "a", "--yes")
    code, found = as_json("mirror", run.uri, tmp_path / "a", "--dry-run")
    assert (code, found["destinations"][0]["result"]) == (1, "would refuse")


def test_once_copies_what_is_there_to_every_destination(run, tmp_path, as_json):
    run.acknowledge("east", 6)
    code, found = as_json("mirror", run.uri, tmp_path / "a", tmp_path / "b", "--once")
    assert code == 0
    assert [(d["state"], d["version"], d["newest"]) for d in found["destinations"]] == [("current", 6, 6)] * 2
    assert files(tmp_path / "a") == files(tmp_path / "b") == files(run.folder)
    assert not (tmp_path / "a" / "replicas").exists()
    assert {d["objects"] for d in found["destinations"]} == {len(files(run.folder)) + 1}  # HEAD twice
    code, found = as_json("mirror", run.uri, tmp_path / "a", "--once")
    assert (code, found["destinations"][0]["objects"]) == (0, 1)  # HEAD


def test_a_person_gets_a_table(run, tmp_path, cli):
    code, out, err = cli("mirror", run.uri, tmp_path / "copy", "--once")
    assert (code, err) == (0, "")
    assert out.splitlines()[1].split() == ["destination", "state", "version", "of", "objects", "written"]
    assert out.splitlines()[2].split()[:4] == [f"file://{tmp_path / 'copy'}", "current", "6", "6"]


def test_damage_at_the_source_exits_with_1_and_names_it(run, tmp_path, as_json, cli, monkeypatch):
    monkeypatch.setattr("delta_sync.fan_out.FIRST_PAUSE", 0.01)
    key = run.manifests[5].objects[0].key
    run.damage(key)
    code, found = as_json("mirror", run.uri, tmp_path / "copy", "--once")
    assert code == 1
    line = found["destinations"][0]
    assert (line["state"], line["version"], line["newest"]) == ("damaged", 4, 6)
    assert key in line["problems"][0]
    assert not (tmp_path / "copy" / key).exists()
    code, _, err = cli("mirror", run.uri, tmp_path / "copy", "--once")
    assert code == 1
    assert key in err


def test_from_anchor_leaves_out_what_is_older(run, tmp_path, as_json):
    code, _ = as_json("mirror", run.uri, tmp_path / "copy", "--once", "--from-anchor")
    assert code == 0
    assert sorted(int(p.name[:12]) for p in (tmp_path / "copy" / "manifests").iterdir()) == [4, 5, 6]


def test_a_destination_of_another_run_is_refused_while_the_others_are_served(run, tmp_path, as_json):
    (tmp_path / "other" / "epochs").mkdir(parents=True)
    claim = (run.folder / "epochs" / "000001.json").read_text()
    (tmp_path / "other" / "epochs" / "000001.json").write_text(claim.replace('"writer":"', '"writer":"x'))
    code, found = as_json("mirror", run.uri, tmp_path / "other", tmp_path / "good", "--dry-run")
    assert (code, [line["result"] for line in found["destinations"]]) == (1, ["would refuse", "would copy"])
    code, found = as_json("mirror", run.uri, tmp_path / "other", tmp_path / "good", "--once")
    assert code == 1
    assert [line["state"] for line in found["destinations"]] == ["refused", "current"]
    assert "another trainer's" in found["destinations"][0]["problems"][0]
    assert versions(tmp_path / "good") == 6


def test_an_empty_source_is_a_problem_at_once(tmp_path, as_json):
    code, found = as_json("mirror", tmp_path / "nothing", tmp_path / "copy", "--once")
    assert (code, found["destinations"][0]["state"]) == (1, "waiting")


@pytest.mark.parametrize("words", [["{run}", "{run}"], ["{run}", "a", "a"], ["{run}", "s4://x"], ["{run}"]])
def test_wrong_usage(run, cli, words):
    assert cli("mirror", *(word.format(run=run.uri) for word in words), "--once")[0] == 2


def test_a_destination_that_cannot_be_written_exits_with_3(run, tmp_path, as_json, monkeypatch):
    monkeypatch.setattr("delta_sync.fan_out.FIRST_PAUSE", 0.01)
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "epochs").symlink_to(tmp_path)
    code, found = as_json("mirror", run.uri, tmp_path / "copy", tmp_path / "good", "--once")
    assert (code, found["destinations"][0]["state"], found["destinations"][0]["tries"]) == (3, "retrying", 6)
    assert versions(tmp_path / "good") == 6


def test_it_follows_a_trainer_until_a_signal_ends_it(run, tmp_path):
    command = [*MIRROR, run.uri, tmp_path / "copy", "--poll", "0.05", "--json"]
    process = subprocess.Popen(
        [*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=HERE
    )
    try:
        until(lambda: versions(tmp_path / "copy") == 6)
        for seed in range(5, 8):
            run.keep(run.publisher.step(seed))
        said = iter(json.loads(line) for line in process.stdout)
        line = next(line for line in said if (line["state"], line["version"]) == ("current", 9))
        assert line["newest"] == 9
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert files(tmp_path / "copy") == files(run.folder)


def test_a_store_that_goes_on_failing_is_said_once(run, tmp_path):
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy" / "epochs").symlink_to(tmp_path)  # no link is followed: every try fails
    with child([*MIRROR, run.uri, str(tmp_path / "copy")], stdout=subprocess.PIPE, env=HERE, text=True) as on:
        lines = iter(on.stdout.readline, "")
        assert any("retrying" in line for line in lines)
        time.sleep(4)  # in which it tries again, and again
        on.send_signal(signal.SIGTERM)
        assert [line for line in lines if "retrying" in line] == []
        assert on.wait(60) == 3


def test_failures_that_differ_in_numbers_alone_are_one():
    assert gist("error 5 in 1.758510022s, after 5 retries") == gist("error 5 in 0.9s, after 4 retries")
    assert gist("connection refused") != gist("no answer in time")
