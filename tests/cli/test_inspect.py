from __future__ import annotations

import numpy as np

from delta_sync import DeltaHeader, decode_delta, diff, dtype, encode_delta, raw

BF16 = dtype("BF16")


def test_histograms_of_known_changes(tmp_path, as_json):
    old = np.full(100, 0x3F80, np.int64)
    new = old.copy()
    for position, step in {0: 1, 1: -1, 10: 5, 99: -64}.items():
        new[position] = old[position] + step
    other = raw("bias", BF16, (4,), np.array([3]), np.array([7], np.uint16))
    data = encode_delta(
        DeltaHeader("run", 2, 1, "gap8-ulp8-zstd", {"note": "x"}),
        [diff("w", BF16, (10, 10), old.astype(np.uint16), new.astype(np.uint16)), other],
    )
    (tmp_path / "delta.safetensors").write_bytes(data)
    code, found = as_json("inspect", tmp_path / "delta.safetensors")
    assert code == 0
    # gaps: 0 before position 0, 0 before 1, 8 before 10, 88 before 99, and 3 in the other tensor
    gaps = {(g["from"], g["to"]): g["count"] for g in found["gaps"] if g["count"]}
    assert gaps == {(0, 0): 2, (2, 3): 1, (8, 15): 1, (64, 127): 1}
    steps = {(s["from"], s["to"]): (s["up"], s["down"]) for s in found["steps"] if s["up"] or s["down"]}
    assert steps == {(1, 1): (1, 1), (4, 7): (1, 0), (64, 127): (0, 1)}
    assert (found["raw_elements"], found["changed_elements"], found["tensors"]) == (1, 5, 2)
    assert sum(found["streams"].values()) == found["bytes"] == len(data)
    assert [(t["name"], t["changed_elements"], t["elements"]) for t in found["top"]] == [("w", 4, 100), ("bias", 1, 4)]
    assert found["objects"][0]["extra"] == {"note": "x"}


def test_a_version_of_a_run_and_the_newest_one(run, as_json, cli):
    ref = run.manifests[3].objects[0]
    code, found = as_json("inspect", f"{run.uri}@3", "--top", 2)
    assert (code, [o["sha256"] for o in found["objects"]]) == (0, [ref.sha256])
    _, deltas = decode_delta((run.folder / ref.key).read_bytes())
    assert [t["changed_elements"] for t in found["top"]] == sorted((d.changed for d in deltas), reverse=True)[:2]
    assert as_json("inspect", run.uri)[1]["objects"][0]["version"] == 6
    assert "most changed tensors" in cli("inspect", run.folder / ref.key)[1]


def test_what_is_no_delta_is_refused_in_one_line(run, cli, tmp_path):
    (tmp_path / "x").write_bytes(b"no delta at all")
    code, out, err = cli("inspect", tmp_path / "x")
    assert (code, out, len(err.splitlines())) == (1, "", 1)
    code, _, err = cli("inspect", f"{run.uri}@99")
    assert (code, len(err.splitlines())) == (1, 1)
