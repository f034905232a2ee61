"""Compaction: what several deltas change as one object, whatever they are coded in, without touching anything else."""

from __future__ import annotations

import pytest
from small_run import Run
from test_context_coded import publish_context_coded

from delta_sync.cli.weights import rebuild
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Position
from delta_sync.store.local import LocalStore


def files(run):
    return {path: path.read_bytes() for path in run.folder.rglob("*") if path.is_file()}


def check(run, base, target):
    """A reader at ``base`` goes over the fold, and has the target's bits."""
    ledger = Ledger(LocalStore(run.folder))
    manifest = ledger.manifest(base)
    plan = ledger.plan(Position(base, manifest.sha256), None)
    assert (plan.deltas[0].base_version, plan.deltas[0].version) == (base, target)
    _, found = rebuild(ledger, plan.target)
    assert {name: bits.tobytes() for name, bits in found.bits.items()} == run.bits[plan.target.version]
    return plan


def test_a_dry_run_says_the_same_and_writes_nothing(run, as_json, cli):
    before = files(run)
    assert cli("compact", run.uri, "--dry-run")[1].startswith("would fold version 4 to 6: 2 deltas of")
    code, would = as_json("compact", run.uri, "--dry-run")
    assert (code, would.pop("written")) == (0, False) and files(run) == before
    assert would == {k: v for k, v in as_json("compact", run.uri)[1].items() if k != "written"}


def test_by_default_from_the_newest_anchor_that_is_far_enough_to_the_newest_version(run, as_json):
    before = files(run)
    code, found = as_json("compact", run.uri)
    assert code == 0
    assert (found["from"], found["to"], found["deltas"]) == (4, 6, 2)
    assert 0 < found["bytes"] < found["bytes_before"]
    after = files(run)
    assert before.items() <= after.items() and len(after) == len(before) + 2
    check(run, 4, 6)
    assert as_json("verify", run.uri)[0] == 0


def test_any_versions_that_deltas_lie_between(run, cli):
    code, out, _ = cli("compact", run.uri, "--from", "1", "--to", "5")
    assert code == 0 and "version 1 to 5: 4 deltas of" in out
    plan = check(run, 1, 5)
    assert not isinstance(plan.deltas[0], Manifest)


def test_what_is_coded_against_the_old_bits_is_decoded_against_them(run, as_json):
    for _ in range(2):
        run.keep(publish_context_coded(run.publisher))
    code, found = as_json("compact", run.uri, "--from", "5")
    assert (code, found["from"], found["to"], found["deltas"]) == (0, 5, 8, 3)
    ledger = Ledger(LocalStore(run.folder))
    (record,) = [ledger.fold(ledger.manifest(8), 5)]
    assert record.codec == "gap8-ulp8-zstd"
    check(run, 4, 5)  # a delta, then the fold if it is smaller than context-coded deltas
    code, found = as_json("verify", run.uri)
    assert (code, found["folds"], found["damage"]) == (0, 1, [])


@pytest.mark.parametrize(
    "words", [("--from", "5"), ("--from", "6"), ("--to", "1"), ("--to", "9"), ("--from", "7"), ("--to", "2")]
)
def test_where_there_is_nothing_to_fold_it_says_so(run, cli, words):
    before = files(run)
    code, _, err = cli("compact", run.uri, *words)
    assert code == 1 and "expected" in err
    assert files(run) == before


def test_damage_on_the_way_leaves_nothing_behind(run, cli):
    run.damage(run.manifests[3].objects[0].key)
    before = files(run)
    code, _, err = cli("compact", run.uri, "--from", "1")
    assert code == 1 and "sha256" in err
    assert files(run) == before


def test_a_damaged_fold_is_named_by_verify_and_does_not_matter(run, as_json):
    key = as_json("compact", run.uri)[1]["objects"][0]
    run.damage(key)
    code, found = as_json("verify", run.uri)
    assert code == 1 and [damage["object"] for damage in found["damage"]] == [key]
    assert "delete" in found["damage"][0]["remedy"]


@pytest.mark.parametrize("lose", [Run.damage, lambda run, key: (run.folder / key).unlink()], ids=["damaged", "gone"])
def test_commands_go_past_a_spoilt_fold_as_replicas_do(run, cli, as_json, tmp_path, lose):
    lose(run, as_json("compact", run.uri)[1]["objects"][0])
    code, found = as_json("materialize", run.uri, tmp_path / "checkpoint")
    assert (code, found["anchor"], found["deltas"]) == (0, 4, 2)
    run.keep(publish_context_coded(run.publisher))
    run.keep(publish_context_coded(run.publisher))
    assert cli("compact", run.uri, "--from", "6")[0] == 0  # decoded against version 6, which the fold leads to
    check(run, 6, 8)


def test_a_version_of_several_ranks_is_one_delta(run, as_json, cli):
    run.publisher.ranks = 2
    for seed in (7, 8):
        assert len(run.publisher.step(seed).objects) == 2
    code, found = as_json("compact", run.uri, "--from", 5)
    assert (code, found["deltas"]) == (0, 3)
    assert "version 5 to 8: 3 deltas of" in cli("compact", run.uri, "--from", 5)[1]
    code, found = as_json("verify", run.uri)
    assert (code, found["damage"], found["folds"]) == (0, [], 1)
