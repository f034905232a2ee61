"""Sizes and speeds by the installed command, on checkpoints and on a run."""

from __future__ import annotations

import numpy as np
from helpers.publish import Publisher


def test_a_runs_version_in_every_layout(run, as_json, cli, tmp_path):
    code, found = as_json("bench", f"{run.uri}@3", "--repeats", 1)
    assert (code, found["changed_elements"]) == (0, run.manifests[3].changed_elements)
    rows = {row["layout"]: row for row in found["layouts"]}
    assert rows["TRL: int32 index + bf16"]["bytes"] == 6 * found["changed_elements"]
    timed = [row for name, row in rows.items() if not name.startswith("raw")]
    assert len(timed) == 6
    assert all(row["encode_bytes_per_second"] > 0 and row["decode_bytes_per_second"] > 0 for row in timed)
    assert found["machine"]["cores"] >= 1

    for version in (2, 3):
        as_json("materialize", f"{run.uri}@{version}", tmp_path / str(version))
    code, pair = as_json("bench", tmp_path / "2", tmp_path / "3", "--repeats", 1)
    assert code == 0
    assert [(r["layout"], r["bytes"]) for r in pair["layouts"]] == [(r["layout"], r["bytes"]) for r in found["layouts"]]
    assert "GB/s" in cli("bench", run.uri, "--repeats", 1)[1]


def test_what_is_left_out_of_an_fp8_run_is_said(tmp_path, cli):
    """As of diff: the first line counts all changes, the table those of 16-bit elements."""
    weights = {"w": np.arange(512, dtype=np.uint16).reshape(8, 64), "eight": np.arange(64, dtype=np.uint8)}
    publisher = Publisher(str(tmp_path / "run"), weights, {"w": "BF16", "eight": "F8_E4M3"})
    publisher.origin(anchor=True)
    publisher.step(1, 0.1)
    code, out, _ = cli("bench", tmp_path / "run", "--repeats", 1)
    assert code == 0
    assert "57 of 576 elements changed" in out
    assert "6 changed elements are not of 16 bits" in out


def test_what_cannot_be_measured(run, cli, tmp_path):
    code, _, err = cli("bench", f"{run.uri}@1")
    assert code == 1 and "expected a delta, got origin" in err
    assert cli("bench", "a", "b", "c")[0] == 2
    assert cli("bench", "ftp://x")[0] == 2
    as_json = cli("materialize", run.uri, tmp_path / "same")
    assert as_json[0] == 0
    code, _, err = cli("bench", tmp_path / "same", tmp_path / "same")
    assert code == 1 and "got none" in err
