"""What became of the documentation's blocks, told at the end of a test run."""

from __future__ import annotations

from collections import defaultdict

TOLD: dict[str, list[str]] = defaultdict(list)


def tally(what: str, block: str) -> None:
    """Note that a block was "run", "parsed only" or "not run"."""
    TOLD[what].append(block)
