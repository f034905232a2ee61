"""What happened since the engine's start, as counts and histograms: what Prometheus is told, and nothing else."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

QUICK = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
SLOW = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
BUCKETS: dict[str, tuple[float, ...]] = {  # of which number of a commit's performance
    "noticed_seconds": SLOW,
    "stage_seconds": SLOW,
    "commit_seconds": QUICK,
    "served_seconds": SLOW,
    "gap_seconds": QUICK,
}
OTHER = "other"
KINDS = (  # of failures; a label must not grow with what a hostile bucket can cause
    "ChainError",
    "ConflictError",
    "FormatError",
    "IntegrityError",
    "MappingError",
    "NotFoundError",
    "RolledBack",
    "SignatureError",
    "StoreError",
    "SyncTimeoutError",
    OTHER,
)


def known(kind: str) -> str:
    """An error's class as a label says it: one of KINDS."""
    kind = kind.partition("/")[0]
    return kind if kind in KINDS else OTHER


@dataclass
class Histogram:
    """Observations in buckets of upper bounds ``bounds``, and one more for what is above the last."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def observe(self, value: float) -> None:
        """One more."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def to_dict(self) -> dict[str, Any]:
        """JSON: bounds, counts of each bucket alone, sum."""
        return {"bounds": list(self.bounds), "counts": list(self.counts), "sum": self.sum}


@dataclass
class Measures:
    """Changed by the coordinator's thread alone; another may read a little late."""

    histograms: dict[str, Histogram] = field(
        default_factory=lambda: {name: Histogram(bounds) for name, bounds in BUCKETS.items()}
    )
    failures: dict[str, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    audits: dict[str, int] = field(default_factory=lambda: {"ok": 0, "failed": 0})
    changed_elements: int = 0
    fetched_bytes: int = 0

    def committed(self, performance: Mapping[str, float], changed: int) -> None:
        """A version was committed; ``performance`` as in its acknowledgement."""
        for name, histogram in self.histograms.items():
            if name in performance:
                histogram.observe(performance[name])
        self.changed_elements += changed
        self.fetched_bytes += int(performance.get("fetched_bytes", 0))

    def failed(self, kind: str) -> None:
        """Something failed with an error of this class, here or on a rank."""
        self.failures[known(kind)] += 1

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON."""
        return {
            "histograms": {name: histogram.to_dict() for name, histogram in self.histograms.items()},
            "failures": dict(self.failures),
            "audits": dict(self.audits),
            "changed_elements": self.changed_elements,
            "fetched_bytes": self.fetched_bytes,
        }
