"""A long run holds no more at its end than at its beginning."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FLAT = {"memory_mb": 700.0, "files": 20, "threads": 9, "snapshots": 1, "publish_ms": 5.0, "wait_ms": 40.0}


@pytest.mark.parametrize(
    ("last", "said"),
    [({}, None), ({"memory_mb": 717.0}, None), ({"memory_mb": 730.0}, "memory"), ({"files": 21}, "files"),
     ({"threads": 10}, "threads"), ({"snapshots": 2}, "snapshots"), ({"wait_ms": 81.0}, "wait_ms")],
)  # fmt: skip
def test_growth_is_named(monkeypatch: pytest.MonkeyPatch, last: dict[str, float], said: str | None) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from flat_run import verdict

    warming_up = {name: value / 2 for name, value in FLAT.items()}
    found = verdict([warming_up, FLAT, FLAT | last], 2.0)
    assert [text.partition(":")[0] for text in found] == ([said] if said else [])


@pytest.mark.long
@pytest.mark.rare
@pytest.mark.timeout(3000)
def test_five_hundred_steps_are_flat() -> None:
    """Memory, files, threads and snapshots; times are printed, and a machine that is shared may triple them."""
    done = subprocess.run(
        [sys.executable, str(BENCHMARKS / "flat_run.py"), "--latency-factor", "10"],
        capture_output=True, text=True, timeout=2900, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.strip().splitlines()[-1])["rows"][-1]["step"] == 500
