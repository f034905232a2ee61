"""What a run in bad weather met, as a table."""

from __future__ import annotations

from collections.abc import Mapping


def fault_table(title: str, faults: Mapping[str, int], again: Mapping[str, int]) -> str:
    """How often each kind of fault was injected, and what was left to be tried again above the store's own retries."""
    rows = [("fault", "times"), *_by_count(faults), ("tried again by writer or reader", "times"), *_by_count(again)]
    width = max(len(name) for name, _ in rows)
    lines = [f"{name:<{width}}  {count:>5}" for name, count in rows]
    return "\n".join(["", title, *lines])


def _by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: -item[1])
