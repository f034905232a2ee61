"""The verdict of benchmarks/rollouts_ahead.py: what is worse, or may be, is never called not worse."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.parametrize(
    ("first", "second", "said"),
    [
        ([0.60, 0.62, 0.61, 0.63], [0.60, 0.62, 0.61, 0.63], "not worse"),
        ([0.60, 0.62, 0.61, 0.63], [0.70, 0.72, 0.71, 0.73], "not worse"),
        ([0.60, 0.62, 0.61, 0.63], [0.595, 0.615, 0.605, 0.625], "not worse"),  # 0.005 of 0.115 are lacking
        ([0.60, 0.62, 0.61, 0.63], [0.58, 0.60, 0.59, 0.61], "not shown"),  # 0.02 of 0.115, in every pair
        ([0.60, 0.62, 0.61, 0.63], [0.52, 0.70, 0.53, 0.71], "not shown"),  # the same mean, but who knows
        ([0.45, 0.55, 0.48, 0.52], [0.45, 0.55, 0.48, 0.52], "nothing learned"),
    ],
)
def test_verdict(monkeypatch: pytest.MonkeyPatch, first: list[float], second: list[float], said: str) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from paired import compare

    verdict = compare(0.5, first, second, margin=0.1)
    assert str(verdict) == said and verdict.not_worse == (said == "not worse")


def test_one_pair_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from paired import compare

    with pytest.raises(ValueError, match="at least 2 pairs"):
        compare(0.5, [0.6], [0.6], margin=0.1)
