"""The search for a start: the cheapest place on the newest version's chain that a replica can begin from."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from delta_sync.digest import state_digest
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError
from delta_sync.manifest import AnchorRecord, Manifest, TensorState
from delta_sync.plan import Plan, Position, Start
from delta_sync.route import Folds, route

if TYPE_CHECKING:
    from delta_sync.ledger import AnchorRef, Ledger

_DAMAGE = (ChainError, FormatError, IntegrityError, NotFoundError)


def build_plan(
    ledger: Ledger,
    head: Manifest,
    position: Position | None,
    live_state: str | None,
    *,
    use_folds: bool = True,
    without: Collection[AnchorRef] = (),
) -> Plan:
    """From ``position`` if deltas or a fold lead on from it, else from the newest version with those bits or an anchor.

    What a reader fetches is the least in bytes that leads there from that start. ``without``: anchors to pass over.
    """
    search = _Search(ledger, head, Folds(ledger, use=use_folds), without, [], [])
    plan = search.from_position(position) if position is not None else None
    plan = plan or search.from_bits(live_state)
    if plan is None:
        raise _no_start(head, search.damage)
    return plan


@dataclass(frozen=True)
class _Search:
    ledger: Ledger
    head: Manifest
    folds: Folds
    without: Collection[AnchorRef]
    damage: list[DeltaSyncError]  # what stood in the way
    anchors: list[DeltaSyncError]  # that part of it which is some anchor's

    def from_position(self, position: Position) -> Plan | None:
        walked: list[Manifest] = []
        for manifest in downwards(self.ledger, self.head, self.damage):
            walked.append(manifest)
            if manifest.sha256 == position.manifest:
                break
            if manifest.version <= position.version:
                return None
        return self._plan("position", position.manifest, None, walked)

    def from_bits(self, live_state: str | None) -> Plan | None:
        anchored = {(ref.version, ref.epoch) for ref in self.ledger.anchors() if ref not in self.without}
        walked: list[Manifest] = []
        for manifest in downwards(self.ledger, self.head, self.damage):
            walked.append(manifest)
            if manifest.state_digest == live_state:
                return self._plan("live", manifest.sha256, None, walked)
            if (manifest.version, manifest.epoch) in anchored:
                plan = self._from_anchor(manifest, walked)
                if plan is not None:
                    return plan
        return None

    def _from_anchor(self, manifest: Manifest, walked: list[Manifest]) -> Plan | None:
        """The plan from one version's anchor; None, with the reason noted, if the anchor is damaged."""
        try:
            anchor = self.ledger.anchor(manifest)
            plan = self._plan("anchor", manifest.sha256, anchor, walked) if anchor else None
            if plan is not None and (got := state_digest(plan.tensors)) != self.head.state_digest:
                what = f"state after anchor {manifest.version} and its deltas"
                raise IntegrityError(what, expected=self.head.state_digest, got=got, remedy="attach a new anchor")
        except _DAMAGE as error:
            self.damage.append(error)
            self.anchors.append(error)
            return None
        return plan

    def _plan(self, start: Start, begin: str, anchor: AnchorRecord | None, walked: list[Manifest]) -> Plan | None:
        """``walked``: from the newest version down to that of manifest ``begin``, or to where the chain ends."""
        steps = route(self.folds, begin, walked[::-1])
        if steps is None:
            return None
        deltas = tuple(step for step in steps if not (isinstance(step, Manifest) and step.kind != "delta"))
        tensors: dict[str, TensorState] = dict(anchor.tensors) if anchor else {}
        for step in deltas:
            tensors.update(step.tensors)
        return Plan(self.head, start, anchor, deltas, tensors, tuple(self.anchors))


def downwards(ledger: Ledger, head: Manifest, damage: list[DeltaSyncError]) -> Iterator[Manifest]:
    """``head`` and the versions that deltas lead from to it; damage ends the walk and is noted.

    An origin ends it too, unless its parent has the very same bits (a trainer that resumed exactly).
    """
    manifest, left = head, ledger.limits.chain
    yield manifest
    while True:
        left -= 1
        if left < 0:
            damage.append(
                ChainError(f"chain of version {head.version}", expected=f"at most {ledger.limits.chain} long")
            )
            return
        try:
            parent = ledger.parent(manifest)
        except _DAMAGE as error:
            if manifest.kind != "origin":  # an origin needs no parent
                damage.append(error)
            return
        if parent is None or (manifest.kind == "origin" and not same_bits(manifest, parent)):
            return
        yield (manifest := parent)


def same_bits(one: Manifest, other: Manifest) -> bool:
    """Whether two versions are the same weights: then nothing has to be done between them."""
    return (one.state_digest, one.model_fingerprint) == (other.state_digest, other.model_fingerprint)


def _no_start(head: Manifest, damage: list[DeltaSyncError]) -> DeltaSyncError:
    """Damage that stood in the way says more than "no start"; a broken chain is a ChainError either way."""
    for error in damage:
        if isinstance(error, (FormatError, IntegrityError)):
            return error
    return ChainError(
        f"way to version {head.version}",
        expected="the replica's version or bits, or an anchor, on its chain",
        got="; ".join(error.what for error in damage) or "none of them",
        remedy=f"attach an anchor to version {head.version} or to one before it",
    )
