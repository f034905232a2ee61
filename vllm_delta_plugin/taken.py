"""One version that a replica took: how long each part of it took, as numbers and as spans."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from delta_sync import tracing
from delta_sync.manifest import Manifest
from vllm_delta_plugin.engine_stage import Staged
from vllm_delta_plugin.reading import NOTHING, Reading
from vllm_delta_plugin.status import Sighting


@dataclass(frozen=True)
class Taken:
    """Served since unix time ``at``; without ``staged`` it was adopted, or loaded in place for ``commit_seconds``."""

    target: Manifest
    sighting: Sighting | None
    read: Reading = NOTHING
    staged: Staged | None = None
    commit_seconds: float | None = None
    at: float = field(default_factory=time.time)

    def performance(self, gap: float | None) -> dict[str, float]:
        """What the acknowledgement says; times between two machines' clocks are at least 0."""
        found: dict[str, float | None] = {
            "commit_seconds": self.commit_seconds,
            "gap_seconds": gap,
            "fetched_bytes": self.read.bytes if self.commit_seconds is not None else None,
        }
        if self.sighting is not None:
            found["noticed_seconds"] = max(0.0, self.sighting.seen - self.sighting.made)
            found["served_seconds"] = max(0.0, self.at - self.sighting.made)
        if self.staged is not None:
            found["stage_seconds"] = self.staged.seconds
        return {name: value for name, value in found.items() if value is not None}

    def trace(self, replica: str, gap: float | None) -> None:
        """Add this replica's spans to the trace that the manifest names."""
        staged, read = self.staged, self.read
        root = _root(self.target, self.sighting, replica, staged.began if staged else self.at)
        if staged is not None:
            proving = staged.began + staged.seconds - staged.proof_seconds
            root.child("delta_sync.take.stage", staged.began, proving, changed_elements=staged.changed)
            root.child("delta_sync.take.prove", proving, staged.began + staged.seconds)
        if read.objects:
            root.child("delta_sync.take.fetch", read.began, read.ended, objects=read.objects, bytes=read.bytes)
        if self.commit_seconds is not None:
            root.child("delta_sync.take.commit", self.at - self.commit_seconds, self.at, gap_seconds=gap)
        root.end(self.at)


def trace_refusal(target: Manifest, sighting: Sighting | None, replica: str, kind: str) -> None:
    """The same for a version that was not taken."""
    _root(target, sighting, replica, time.time()).end(error=kind)


def _root(target: Manifest, sighting: Sighting | None, replica: str, began: float) -> tracing.Span:
    seen = began if sighting is None else sighting.seen
    about = {"replica": replica, "run": target.run, "version": target.version}
    root = tracing.begin("delta_sync.take", began=seen, parent=target.traceparent, **about)
    if sighting is not None:
        root.child("delta_sync.take.notice", min(sighting.made, sighting.seen), sighting.seen)
    return root
