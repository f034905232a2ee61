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
    following = fresh.following(run, transition="recompute")
    found = fresh.run(
        tmp_path / "queued",
        "queued_run.py",
        {
            "model": str(base),
            "run": str(run),
            "llm": {**fresh.ENGINE, **following},
            "prompts": PROMPTS,
            "tokens": 1500,
            "versions": 3,
        },
    )
    assert len(found["in_flight"]) == 3, found["status"]
    assert max(found["in_flight"]) > 0, "no batch was in flight at any commit"
    pieces = []
    for prompt, answer in zip(PROMPTS, found["answers"], strict=True):
        spans = answer["versions"]
        assert [s["version"] for s in spans] == ["1/1", "2/1", "3/1", "4/1"]
        assert (spans[0]["start"], spans[-1]["end"], len(answer["tokens"])) == (0, 1500, 1500)
        s = spans[2]
        pieces.append((prompt + answer["tokens"][: s["start"]], answer["tokens"][s["start"] : s["end"]]))
    longest = max(len(piece) for _, piece in pieces)
    plain = fresh.following(tmp_path / "no-run")
    [expected] = fresh.ask(tmp_path / "fresh", tmp_path / "v3", plain, [before for before, _ in pieces], longest)
    for (_, piece), answer in zip(pieces, expected["answers"], strict=True):
        assert piece == answer["tokens"][: len(piece)]
