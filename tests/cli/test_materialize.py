from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.publish import read_checkpoint
from safetensors.torch import load_file
from small_run import SHAPES


@pytest.mark.parametrize("version", [1, 3, 4, 6, None])
def test_a_version_becomes_a_checkpoint_bit_for_bit(run, as_json, tmp_path, version):
    folder = tmp_path / "out"
    uri = run.uri if version is None else f"{run.uri}@{version}"
    code, found = as_json("materialize", uri, folder)
    assert (code, found["version"]) == (0, version or 6)
    assert found["anchor"] == (1 if version in (1, 3) else 4)
    weights, _ = read_checkpoint(folder)
    assert {name: bits.tobytes() for name, bits in weights.items()} == run.bits[version or 6]
    assert set(load_file(folder / "model.safetensors")) == weights.keys()
    assert [path.name for path in tmp_path.iterdir() if "partial" in path.name] == []


def test_config_and_tokenizer_come_along(run, cli, tmp_path):
    shard = (run.folder / "anchors/000000000004-000001/model.safetensors").read_bytes()
    config = json.dumps({"model_type": "x"}).encode()
    run.publisher.ledger.store.delete("anchors/000000000004-000001/anchor.json")
    run.publisher.weights = {k: v.copy() for k, v in run.publisher.published.items()}
    run.publisher.anchor(run.manifests[6], None)
    newest = (run.folder / "anchors/000000000006-000001/model.safetensors").read_bytes()
    assert newest != shard
    run.publisher.anchor(run.manifests[6], {"model.safetensors": newest, "config.json": config})
    code, _, err = cli("materialize", run.uri, tmp_path / "out")
    assert (code, err) == (0, "")
    assert (tmp_path / "out" / "config.json").read_bytes() == config


def test_what_exists_is_never_touched(run, cli, tmp_path):
    (tmp_path / "out").mkdir()
    code, _, err = cli("materialize", run.uri, tmp_path / "out")
    assert code == 2
    assert "exists" in err
    assert list((tmp_path / "out").iterdir()) == []


def test_damage_leaves_nothing_behind(run, as_json, tmp_path):
    run.damage(run.manifests[6].objects[0].key)
    code, found = as_json("materialize", run.uri, tmp_path / "out")
    assert (code, found["error"]["kind"]) == (1, "IntegrityError")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    assert as_json("materialize", f"{run.uri}@5", tmp_path / "out")[0] == 0


@pytest.mark.parametrize("damage", ["bit", "gone", "record", "content"])
def test_around_a_damaged_anchor_goes_an_older_one(run, cli, as_json, tmp_path, damage):
    folder = run.folder / "anchors/000000000004-000001"
    shard = folder / "model.safetensors"
    if damage == "bit":
        run.damage("anchors/000000000004-000001/model.safetensors")
    elif damage == "gone":
        shard.unlink()
    elif damage == "record":
        (folder / "anchor.json").write_bytes(b"{}")
    else:
        data = bytearray(shard.read_bytes())
        data[-1] ^= 1
        states = run.publisher.states({n: np.frombuffer(b, "<u2").reshape(SHAPES[n]) for n, b in run.bits[4].items()})
        run.publisher.writer.attach_anchor(run.manifests[4], {"model.safetensors": bytes(data)}, states)
    code, found = as_json("materialize", run.uri, tmp_path / "out")
    assert (code, found["anchor"], found["deltas"], len(found["anchors_left_out"])) == (0, 1, 5, 1)
    weights, _ = read_checkpoint(tmp_path / "out")
    assert {name: bits.tobytes() for name, bits in weights.items()} == run.bits[6]
    code, out, err = cli("materialize", run.uri, tmp_path / "again")
    assert code == 0 and "from the anchor of version 1 and 5 deltas" in out
    assert f"an anchor is left out: {found['anchors_left_out'][0]}" in err
    run.damage("anchors/000000000001-000001/model.safetensors")
    code, found = as_json("materialize", run.uri, tmp_path / "not")
    assert code == 1 and "no older anchor leads there" in found["error"]["message"]
    assert not (tmp_path / "not").exists()


def test_a_version_that_is_not_there(run, as_json, tmp_path):
    code, found = as_json("materialize", f"{run.uri}@7", tmp_path / "out")
    assert (code, found["error"]["kind"]) == (1, "ChainError")


def test_a_damaged_newest_version_keeps_no_older_one_from_being_written(run, cli, as_json, tmp_path):
    """Servers fall back to the newest version before it that they can prove."""
    run.damage(run.manifests[6].key)
    for version in (5, 2):
        code, out, err = cli("materialize", f"{run.uri}@{version}", tmp_path / str(version))
        assert (code, out.splitlines()[0].split(":")[0]) == (0, f"version {version} in {tmp_path / str(version)}")
        assert "a newer version is damaged" in err
        weights, _ = read_checkpoint(tmp_path / str(version))
        assert {name: bits.tobytes() for name, bits in weights.items()} == run.bits[version]
    assert as_json("inspect", f"{run.uri}@5")[1]["changed_elements"] == run.manifests[5].changed_elements
    for what in (run.uri, f"{run.uri}@6", f"{run.uri}@7"):
        code, _, err = cli("materialize", what, tmp_path / "no")
        assert (code, len(err.splitlines())) == (1, 1)
        assert "expected canonical JSON" in err or "manifest" in err
