"""The matrix of real runs: which there are, what is measured of a step, and how the file becomes a table."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "benchmarks" / "gpu")]
TRACE = ROOT / "tests" / "traces" / "lr3e-06-float32-grpo-step20.npz"


def test_rows_become_a_table_of_the_steps_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import trace_matrix
    from traces import load

    changes, made = load(TRACE)
    row = trace_matrix.measure(changes)
    assert row["trl"] == 6
    assert row["changed"] == sum(int((c.old != c.new).sum()) for c in changes)
    assert row["ours"] <= row["gap"]
    assert row["over_bound"] == pytest.approx(row["ours"] / row["bound"], abs=1e-3)
    recipe = {key: made[key] for key in ("lr", "weight_decay", "objective", "masters")}
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [*recipe, "step", *row])
        writer.writeheader()
        writer.writerows([{**recipe, "step": 20, **row}, {**recipe, "step": 5, "changed": 0, "changed_percent": 0.0}])
    lines = trace_matrix.table(path).splitlines()
    assert len({line.count("|") for line in lines}) == 1
    assert [line.split(" | ")[:2] for line in lines[2:]] == [
        ["| grpo lr 3e-06 float32", "20"],
        ["| grpo lr 3e-06 float32", "5"],
    ]
    assert len(trace_matrix.table(path, [5]).splitlines()) == 3
    few = trace_matrix.table(path, [20], ["of TRL", "ours"]).splitlines()
    assert few[0] == "| run | step | of TRL | ours |"
    assert few[2] == f"| grpo lr 3e-06 float32 | 20 | {row['of_trl']:.3f} | {row['ours']:.3f} |"


def test_runs_are_named_once_and_chosen_by_parts_of_their_names() -> None:
    pytest.importorskip("transformers")
    import trace_matrix

    names = [trace_matrix.title(recipe) for recipe in trace_matrix.recipes([])]
    assert len(set(names)) == len(names) == 17
    assert [trace_matrix.title(r) for r in trace_matrix.recipes(["grpo,bfloat16"])] == ["grpo lr 3e-06 bfloat16"]


def test_pieces_make_the_file_they_were_cut_from(tmp_path: Path) -> None:
    import trace_matrix

    for name, part in (("m.gguf.ab", b"second"), ("m.gguf.aa", b"first ")):
        (tmp_path / name).write_bytes(part)
    assert trace_matrix.join(tmp_path, tmp_path).read_bytes() == b"first second"
