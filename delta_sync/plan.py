"""How a replica gets from what it has to the newest version; plain values, so that pickle carries it to workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_sync.errors import DeltaSyncError
from delta_sync.manifest import AnchorRecord, FoldRecord, Manifest, TensorState

Start = Literal["position", "live", "anchor", "back"]
Step = Manifest | FoldRecord  # both have run, version, base_version, objects, tensors, codec and state_digest


@dataclass(frozen=True)
class Position:
    """Where a replica is: a version, and the sha256 hex of its manifest."""

    version: int
    manifest: str


@dataclass(frozen=True)
class Plan:
    """Begin at ``start``, apply the objects of ``deltas``, some of them folds of several, in order: be at ``target``.

    ``start``: "position" (the bits the replica serves as of its position), "live" (those bits are some version's,
    proven by their state digest), "anchor" (complete weights of ``anchor``, taken first) or "back" (the bits at the end
    of ``deltas``, which are undone).
    ``tensors``: every tensor that anchor and deltas touch, with its state at ``target``. Where ``target`` is an adapter
    these lead to the weights below it; its own object comes on top, and those of adapters before it are not needed.
    ``damaged``: what is wrong with anchors nearer to ``target``, over which the search for a start went on.
    """

    target: Manifest
    start: Start
    anchor: AnchorRecord | None
    deltas: tuple[Step, ...]
    tensors: Mapping[str, TensorState]
    damaged: tuple[DeltaSyncError, ...] = field(default=(), compare=False)

    @property
    def position(self) -> Position:
        """Where the replica will be."""
        return Position(self.target.version, self.target.sha256)
