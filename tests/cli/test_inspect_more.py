"""What is inspected besides plain deltas: complete weights, a version of several ranks, tensors by layer."""

from __future__ import annotations

import numpy as np
from helpers.publish import Publisher
from small_run import SHAPES

from delta_sync import DeltaHeader, dtype, encode_delta, raw


def test_an_origin_shows_its_tensors_and_its_anchor(run, as_json, cli):
    code, found = as_json("inspect", f"{run.uri}@1")
    assert (code, found["kind"], found["tensors"], found["dtypes"]) == (0, "origin", 3, {"BF16": 3})
    assert {t["name"]: tuple(t["shape"]) for t in found["all"]} == SHAPES
    assert [ref["key"].rpartition("/")[2] for ref in found["anchor"]] == ["model.safetensors"]
    out = cli("inspect", f"{run.uri}@1")[1]
    assert "embed.weight" in out and "model.safetensors" in out


def test_a_checkpoints_file_shows_its_tensors(run, as_json, tmp_path):
    as_json("materialize", run.uri, tmp_path / "six")
    code, found = as_json("inspect", tmp_path / "six" / "model.safetensors")
    assert (code, found["kind"], found["anchor"]) == (0, "weights", None)
    assert found["bytes"] == sum(t["bytes"] for t in found["all"]) == 2 * (96 * 64 + 64 * 64 + 64)


def test_layers_and_bars(run, as_json, cli):
    code, found = as_json("inspect", f"{run.uri}@3")
    assert code == 0
    assert {row["layer"] for row in found["top_layers"]} == {"embed", "layer", "norm"}
    assert sum(row["changed_elements"] for row in found["top_layers"]) == found["changed_elements"]
    first, *_ = found["top_layers"]
    assert first == {"layer": "embed", "changed_elements": first["changed_elements"], "elements": 96 * 64}
    lines = cli("inspect", f"{run.uri}@3")[1].splitlines()
    rows = lines[lines.index("most changed layers") + 2 :]
    assert rows[0].startswith("embed") and rows[0].endswith("█" * 24)
    assert rows[2].startswith("norm") and "█" * 2 not in rows[2]


def test_several_ranks_are_shown_as_one_rank_with_the_same_changes(run, as_json, tmp_path):
    shown = []
    for ranks in (1, 3):
        uri = str(tmp_path / str(ranks))
        publisher = Publisher(uri, run.publisher.weights)
        publisher.ranks = ranks
        publisher.origin(anchor=True)
        manifest = publisher.step(1)
        assert len(manifest.objects) == ranks
        assert as_json("verify", uri)[1]["proven"] == [1, 2]
        code, found = as_json("inspect", uri)
        assert (code, found["changed_elements"]) == (0, manifest.changed_elements)
        assert all(row["changed_elements"] <= 0.03 * row["elements"] for row in found["top"] + found["top_layers"])
        shown.append({name: found[name] for name in ("tensors", "changed_elements", "gaps", "steps")})
        shown[-1]["top"] = sorted(found["top"], key=lambda row: row["name"])
        shown[-1]["top_layers"] = sorted(found["top_layers"], key=lambda row: row["layer"])
    assert shown[0] == shown[1]


def test_a_layer_of_which_only_raw_bits_are_known_has_a_share_too(tmp_path, as_json):
    set_to = raw("bias", dtype("BF16"), (4,), np.array([3]), np.array([7], np.uint16))
    data = encode_delta(DeltaHeader("run", 2, 1, "gap8-ulp8-zstd"), [set_to])
    (tmp_path / "delta.safetensors").write_bytes(data)
    layers = as_json("inspect", tmp_path / "delta.safetensors")[1]["top_layers"]
    assert layers == [{"layer": "bias", "changed_elements": 1, "elements": 4}]
