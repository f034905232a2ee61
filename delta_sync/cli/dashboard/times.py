"""How long replicas' commits took, remembered: an acknowledgement tells only of the last one."""

from __future__ import annotations

import time
from collections.abc import Sequence

from delta_sync.cli.view import Row

VERSIONS = 10_000  # that are remembered
_KEPT = ("gap_seconds", "served_seconds")


class CommitTimes:
    """Collects what acknowledgements say of each commit, from ``since`` (unix seconds) on; by version."""

    def __init__(self) -> None:
        self.since = time.time()
        self._seen: dict[str, tuple[object, object]] = {}  # by replica: what was taken last
        self._told: dict[int, list[dict[str, float]]] = {}

    def take(self, replicas: Sequence[Row]) -> None:
        """Remember commits that were not told before."""
        for row in replicas:
            told = {name: row["performance"][name] for name in _KEPT if name in row["performance"]}
            if row["version"] is None or not told or self._seen.get(row["replica"]) == (row["version"], told):
                continue
            self._seen[row["replica"]] = (row["version"], told)
            self._told.setdefault(row["version"], []).append(told)
        while len(self._told) > VERSIONS:
            del self._told[min(self._told)]

    def of(self, version: int) -> list[dict[str, float]]:
        """What replicas told of their commits of one version."""
        return list(self._told.get(version, ()))
