from __future__ import annotations

import re
import time

import pytest

from delta_sync.ack import Ack


def test_every_version_with_its_bytes_parent_and_anchor(run, as_json):
    code, found = as_json("ledger", run.uri)
    assert code == 0
    assert [v["version"] for v in found["versions"]] == [1, 2, 3, 4, 5, 6]
    assert [v["version"] for v in found["versions"] if v["anchor"]] == [1, 4]
    for version in found["versions"]:
        manifest = run.manifests[version["version"]]
        assert version["kind"] == ("origin" if manifest.version == 1 else "delta")
        assert version["manifest"] == manifest.sha256
        assert version["bytes"] == sum((run.folder / ref.key).stat().st_size for ref in manifest.objects)
        assert version["changed_elements"] == manifest.changed_elements
        if manifest.version > 1:
            assert version["parent"] == run.manifests[manifest.version - 1].sha256


def test_last_shows_the_newest(run, as_json):
    code, found = as_json("ledger", run.uri, "--last", 2)
    assert (code, [v["version"] for v in found["versions"]], found["chain_end"]) == (0, [5, 6], None)


def test_replicas_with_lag_and_error_and_exit_1_for_a_refusal(run, cli, as_json):
    run.acknowledge("east", 6)
    assert as_json("ledger", run.uri)[0] == 0
    trouble = {"refused_version": 5, "error_kind": "IntegrityError", "error": "sha256 of it\x1b[2J differs"}
    run.acknowledge("west", 4, state="refused", **trouble)
    code, found = as_json("ledger", run.uri)
    assert code == 1
    replicas = [(r["replica"], r["lag"], r["on_chain"]) for r in found["replicas"]]
    assert replicas == [
        ("east", 0, True),
        ("west", 2, True),
    ]
    code, out, _ = cli("ledger", run.uri)
    assert code == 1
    line = next(line for line in out.splitlines() if line.startswith("west"))
    assert "refused 5: sha256 of it" in line
    assert "\x1b" not in out  # a replica's words must not steer a terminal


def test_a_replica_that_serves_none_of_these_versions(run, cli, as_json):
    run.publisher.ledger.acknowledge(Ack("astray", 5, "0" * 64, 1, "live", None, None, None, None, 1.8e9))
    assert as_json("ledger", run.uri)[1]["replicas"][0]["on_chain"] is False
    assert as_json("ledger", run.uri, "--last", 1)[1]["replicas"][0]["on_chain"] is None
    assert "serves a version that is none of this chain's" in cli("ledger", run.uri)[1]


def state_of(replica, out):
    return re.split(" {2,}", next(line for line in out.splitlines() if line.startswith(replica)))[1]


@pytest.mark.parametrize("last", [(), ("--last", 1)], ids=["all", "one version listed"])
def test_a_replica_that_says_nothing_to_newer_versions_is_called_silent(run, cli, monkeypatch, last):
    """It took version 4 and died; one that serves the newest has nothing to say, however long ago it did."""
    for name, version in (("dead", 4), ("current", 6)):
        run.acknowledge(name, version, time=time.time())
    run.acknowledge("refusing", 4, time=time.time(), state="refused", refused_version=5, error="no")
    out = cli("ledger", run.uri, *last)[1]
    assert [state_of(name, out) for name in ("dead", "current", "refusing")] == ["live", "live", "refused"]
    later = time.time() + 3 * 3600
    monkeypatch.setattr(time, "time", lambda: later)
    out = cli("ledger", run.uri, *last)[1]
    assert [state_of(name, out) for name in ("dead", "current", "refusing")] == ["silent for 3.0h", "live", "refused"]
    assert "replica dead: silent for 3.0h, version 4, 2 behind" in cli("watch", run.uri, *last, "--for", 0)[1]
    (run.folder / run.manifests[5].key).unlink()  # as retention does
    assert state_of("dead", cli("ledger", run.uri, "--last", 1)[1]) == "silent for 3.0h"


def test_a_replica_is_not_silent_before_there_is_something_to_say(run, cli, monkeypatch):
    now = time.time() + 5 * 3600  # after a long pause of the trainer a version has just come
    run.acknowledge("east", 6, time=time.time())
    monkeypatch.setattr(time, "time", lambda: now)
    run.keep(run.publisher.step(9))
    assert state_of("east", cli("ledger", run.uri)[1]) == "live"


def test_an_empty_place_is_a_problem_and_no_traceback(tmp_path, cli, as_json):
    code, out, err = cli("ledger", tmp_path / "nothing")
    assert (code, out) == (1, "")
    assert "expected at least one version" in err
    assert as_json("ledger", tmp_path / "nothing")[1]["error"]["kind"] == "ChainError"


def test_a_damaged_old_manifest_ends_the_chain_with_exit_1(run, as_json):
    run.damage(run.manifests[2].key)
    code, found = as_json("ledger", run.uri)
    assert (code, [v["version"] for v in found["versions"]]) == (1, [3, 4, 5, 6])
    assert run.manifests[2].key in found["chain_end"]


def test_a_misspelt_uri_is_wrong_usage(cli):
    code, _, err = cli("ledger", "s4://bucket/run")
    assert code == 2
    assert "s4" in err


def test_a_store_that_cannot_be_read_exits_with_3(tmp_path, as_json):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifests").symlink_to(tmp_path)  # which a store must not follow
    code, found = as_json("ledger", tmp_path / "run")
    assert (code, found["error"]["kind"]) == (3, "StoreError")
