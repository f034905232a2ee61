"""Is one way of training worse than another? A verdict over pairs of runs that have a seed in common."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Estimate:
    """A mean and its standard error."""

    mean: float
    error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """Of at least two values; ValueError for fewer."""
        if len(values) < 2:
            raise ValueError(f"a standard error: expected at least 2 pairs, got {len(values)}")
        return cls(statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values)))

    @property
    def least(self) -> float:
        """Two standard errors below the mean."""
        return self.mean - 2 * self.error

    def __str__(self) -> str:
        return f"{self.mean:+.4f} ± {2 * self.error:.4f}"


@dataclass(frozen=True)
class Verdict:
    """What the first way gained, what the second has beyond it, and how much less of the gain is still not worse."""

    gain: Estimate
    difference: Estimate
    margin: float

    @property
    def learned(self) -> bool:
        """Whether there was a gain at all: without one nothing can be said."""
        return self.gain.least > 0

    @property
    def not_worse(self) -> bool:
        """Whether even two standard errors below its mean the second way lacks at most ``margin`` of the gain."""
        return self.learned and self.difference.least >= -self.margin * self.gain.mean

    def __str__(self) -> str:
        return "not worse" if self.not_worse else "not shown" if self.learned else "nothing learned"


def compare(start: float, first: Sequence[float], second: Sequence[float], margin: float) -> Verdict:
    """The verdict over pairs: what either way reached from ``start``, in the order of their seeds."""
    gain = Estimate.of([value - start for value in first])
    return Verdict(gain, Estimate.of([b - a for a, b in zip(first, second, strict=True)]), margin)
