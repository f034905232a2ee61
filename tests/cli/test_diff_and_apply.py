"""Deltas made from two checkpoints and applied to one: the very bits, or nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from helpers.publish import read_checkpoint, write_checkpoint

from delta_sync import dtype
from delta_sync.checkpoint import Checkpoint

SHAPES = {"embed.weight": (96, 64), "layer.weight": (640, 640), "norm.weight": (64,)}


def save(folder, weights, kind="BF16", **others):
    folder.mkdir()
    write_checkpoint(folder, weights, lambda name: dtype(kind))
    for name, text in others.items():
        (folder / name).write_text(text)
    return folder


@pytest.fixture
def pair(tmp_path):
    rng = np.random.default_rng(5)
    old = {n: (rng.normal(0, 0.02, s).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
           for n, s in SHAPES.items()}  # fmt: skip
    new = {name: bits.copy() for name, bits in old.items()}
    for bits in (new["layer.weight"], new["norm.weight"]):
        flat = bits.reshape(-1)
        at = np.argsort(flat & 0x7FFF)[: max(1, flat.size // 50)]  # small weights change, as in training
        flat[at] += rng.choice(np.array([1, 65535], np.uint16), at.size)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "sub").mkdir()
    (tmp_path / "a" / "sub" / "vocab.txt").write_text("words")
    (tmp_path / "a" / "config.json").write_text("{}")
    write_checkpoint(tmp_path / "a", old, lambda name: dtype("BF16"))
    return tmp_path / "a", save(tmp_path / "b", new), old, new


@pytest.mark.parametrize("codec", ["gap", "context"])
def test_a_delta_of_two_checkpoints_leads_from_the_one_to_the_other(pair, tmp_path, as_json, cli, codec):
    a, b, old, new = pair
    file = tmp_path / "delta.safetensors"
    code, found = as_json("diff", a, b, "--out", file, "--codec", codec)
    changed = {name: int((old[name] != new[name]).sum()) for name in old}
    assert (code, found["changed_elements"], found["changed_tensors"]) == (0, sum(changed.values()), 2)
    assert [t["name"] for t in found["top"]] == ["layer.weight", "norm.weight"]
    assert found["file"]["bytes"] == file.stat().st_size
    layouts = {row["layout"]: row["bytes"] for row in found["layouts"]}
    assert layouts["TRL: int32 index + bf16"] == 6 * sum(changed.values())
    assert layouts["ours: context8-ulp8-zstd"] < layouts["ours: gap8-ulp8-zstd"] < layouts["TRL: int32 index + bf16"]
    assert layouts["raw: every element"] == 2 * sum(bits.size for bits in old.values())

    code, found = as_json("apply", a, file, tmp_path / "out")
    assert (code, found["proven"], found["written"]) == (0, True, True)
    weights, _ = read_checkpoint(tmp_path / "out")
    assert {name: bits.tobytes() for name, bits in weights.items()} == {n: bits.tobytes() for n, bits in new.items()}
    assert found["files"] == ["config.json", "model.safetensors", "sub/vocab.txt"]
    assert (tmp_path / "out" / "sub" / "vocab.txt").read_text() == "words"

    code, _, err = cli("apply", b, file, tmp_path / "wrong")
    assert code == 1 and "base of" in err and "name the checkpoint that this delta was made from" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "delta.safetensors", "out"]


def test_a_damaged_delta_writes_nothing(pair, tmp_path, as_json):
    a, b, *_ = pair
    file = tmp_path / "delta.safetensors"
    as_json("diff", a, b, "--out", file)
    data = bytearray(file.read_bytes())
    data[-2] ^= 1  # a sign
    file.write_bytes(data)
    code, found = as_json("apply", a, file, tmp_path / "out")
    assert code == 1 and found["error"]["kind"] in ("FormatError", "IntegrityError")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b", "delta.safetensors"]


def test_versions_of_a_run_are_applied_to_a_checkpoint(run, tmp_path, as_json, cli):
    assert as_json("materialize", f"{run.uri}@1", tmp_path / "one")[0] == 0
    code, found = as_json("apply", tmp_path / "one", f"{run.uri}@2", f"{run.uri}@3", tmp_path / "three")
    assert (code, found["proven"]) == (0, True)
    assert found["state_digest"] == run.manifests[3].state_digest
    weights, _ = read_checkpoint(tmp_path / "three")
    assert {name: bits.tobytes() for name, bits in weights.items()} == run.bits[3]
    code, _, err = cli("apply", tmp_path / "one", f"{run.uri}@3", tmp_path / "x")
    assert code == 1 and "base of" in err and not (tmp_path / "x").exists()
    assert cli("apply", tmp_path / "one", f"{run.uri}@1", tmp_path / "x")[0] == 1  # an origin changes nothing


def test_objects_of_a_run_alone_are_applied_and_not_called_proven(run, tmp_path, cli, as_json):
    as_json("materialize", f"{run.uri}@1", tmp_path / "one")
    two, three, four = (run.folder / run.manifests[k].objects[0].key for k in (2, 3, 4))
    code, out, err = cli("apply", tmp_path / "one", two, three, tmp_path / "three")
    assert code == 0 and "not proven" in err and "proven" not in out
    weights, _ = read_checkpoint(tmp_path / "three")
    assert {name: bits.tobytes() for name, bits in weights.items()} == run.bits[3]
    code, _, err = cli("apply", tmp_path / "one", two, four, tmp_path / "x")
    assert code == 1 and "base version of" in err and not (tmp_path / "x").exists()


def test_a_dry_run_proves_and_writes_nothing(run, tmp_path, as_json):
    as_json("materialize", f"{run.uri}@1", tmp_path / "one")
    code, found = as_json("apply", "--dry-run", tmp_path / "one", f"{run.uri}@2", tmp_path / "two")
    assert (code, found["proven"], found["written"], found["files"]) == (0, True, False, [])
    assert not (tmp_path / "two").exists()


def test_wrong_usage(pair, tmp_path, cli):
    a, b, *_ = pair
    assert cli("diff", a, b, "--out", a)[0] == 2
    assert cli("apply", a, tmp_path / "only-one")[0] == 2
    assert cli("apply", a, "x", b)[0] == 2  # DIR exists
    assert cli("apply", a, "no-such-file", tmp_path / "out")[0] == 2
    assert cli("diff", a, tmp_path / "nothing")[0] == 1


def test_other_models_are_refused_by_the_tensor_that_differs(pair, tmp_path, cli):
    a, _, old, _ = pair
    other = save(tmp_path / "c", {**old, "norm.weight": old["norm.weight"][:32]})
    code, _, err = cli("diff", a, other)
    assert code == 1 and "'norm.weight'" in err and "[64]" in err and "[32]" in err


def test_same_weights_and_wider_elements(pair, tmp_path, as_json, cli):
    a, *_ = pair
    code, found = as_json("diff", a, a)
    assert (code, found["changed_elements"], found["layouts"], found["top"]) == (0, 0, [], [])
    wide = {"w": np.arange(6, dtype=np.uint32).reshape(2, 3)}
    old, new = save(tmp_path / "w1", wide, "F32"), save(tmp_path / "w2", {"w": wide["w"] + 1}, "F32")
    out = cli("diff", old, new, "--out", tmp_path / "w.safetensors")[1]
    assert "6 changed elements are not of 16 bits" in out
    assert as_json("apply", old, tmp_path / "w.safetensors", tmp_path / "w3")[1]["proven"]


def test_sharded_and_single_file_checkpoints(pair, tmp_path):
    a, _, old, _ = pair
    shards = tmp_path / "shards"
    shards.mkdir()
    weight_map = {}
    for k, (name, bits) in enumerate(old.items()):
        write_checkpoint(shards, {name: bits}, lambda name: dtype("BF16"))
        (shards / "model.safetensors").rename(shards / f"{k}.safetensors")
        weight_map[name] = f"{k}.safetensors"
    (shards / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    whole = {name: bits.tobytes() for name, *_, bits in Checkpoint(a)}
    assert {name: bits.tobytes() for name, *_, bits in Checkpoint(shards)} == whole
    assert {name: bits.tobytes() for name, *_, bits in Checkpoint(a / "model.safetensors")} == whole
