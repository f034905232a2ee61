"""A thousand commits leave a process no larger than a hundred did: memory, open files and threads stay flat."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
from helpers.tiny_models import build

pytestmark = pytest.mark.long
COMMITS, WARM = 1000, 100
SHARE = 0.05  # of all elements, changed each time: a leaked staging would be some 200 kB
GROWTH = 32 << 20  # bytes that 900 commits may add, less than 40 kB each


def test_a_thousand_commits_leak_nothing(tmp_path: Path) -> None:
    base, run = build(tmp_path / "base", "qwen3"), str(tmp_path / "run")
    llm = {**fresh.ENGINE, **fresh.following(run, poll=0.01)}
    asked = {"model": str(base), "run": run, "llm": llm, "commits": COMMITS, "marks": [WARM, COMMITS], "share": SHARE}
    found = fresh.run(tmp_path / "long", "thousand_commits.py", asked, timeout=1500)
    assert found["commits"] == COMMITS and found["state"] == found["published"]
    early, late = found["marks"][str(WARM)], found["marks"][str(COMMITS)]
    assert late["handles"] <= early["handles"] and late["threads"] <= early["threads"], found
    assert late["rss"] - early["rss"] < GROWTH, found
