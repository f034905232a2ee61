"""Batches that are in flight at a commit: their tokens carry the version that computed them."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
from helpers.tiny_models import build

PROMPTS = [[10 + 3 * i + j for j in range(8 + i)] for i in range(4)]


@pytest.mark.long
def test_tokens_in_flight_at_a_commit_are_told_from_those_after_it(tmp_path: Path) -> None:
    pytest.importorskip("vllm.outputs").__dict__.get("WeightVersionSpan") or pytest.skip(
        "this vLLM does not show spans"
    )
    base, run = build(tmp_path / "base"), tmp_path / "run"
    llm = {**fresh.ENGINE, **fresh.following(run)}
    request = {"model": str(base), "run": str(run), "llm": llm, "prompts": PROMPTS, "tokens": 1500, "versions": 5}
    found = fresh.run(tmp_path / "queued", "queued_run.py", request)
    assert len(found["commits"]) == 5, found["status"]
    assert max(commit["in_flight"] for commit in found["commits"]) > 0, "no batch was in flight at any commit"
    for prompt, answer in zip(PROMPTS, found["answers"], strict=True):
        starts = [0, *[commit["computed"][str(prompt[0])] for commit in found["commits"]]]
        ends = [*starts[1:], 1500]
        assert answer["versions"] == [
            {"version": f"{number}/1", "start": start, "end": end}
            for number, (start, end) in enumerate(zip(starts, ends, strict=True), 1)
        ]
