"""What is inspected besides plain deltas: complete weights, and deltas that need the bits they change."""

from __future__ import annotations

from small_run import SHAPES


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
