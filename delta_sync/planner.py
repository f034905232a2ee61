"""The search for a start: the cheapest place on the newest version's chain that a replica can begin from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from delta_sync.digest import state_digest
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError
from delta_sync.manifest import AnchorRecord, Manifest, TensorState
from delta_sync.plan import Plan, Position, Start

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

_DAMAGE = (ChainError, FormatError, IntegrityError, NotFoundError)


def build_plan(ledger: Ledger, head: Manifest, position: Position | None, live_state: str | None) -> Plan:
    """From ``position`` if it is on the chain, else from the newest version that has the live bits or an anchor."""
    damage: list[DeltaSyncError] = []
    plan = None
    if position is not None:
        plan = _from_position(ledger, head, position, damage)
    plan = plan or _from_bits(ledger, head, live_state, damage)
    if plan is None:
        raise _no_start(head, damage)
    return plan


def _from_position(ledger: Ledger, head: Manifest, position: Position, damage: list[DeltaSyncError]) -> Plan | None:
    path: list[Manifest] = []
    for manifest in _downwards(ledger, head, damage):
        if manifest.sha256 == position.manifest:
            return _plan(head, "position", None, path)
        if manifest.version <= position.version:
            return None
        path.append(manifest)
    return None


def _from_bits(ledger: Ledger, head: Manifest, live_state: str | None, damage: list[DeltaSyncError]) -> Plan | None:
    anchored = {(ref.version, ref.epoch) for ref in ledger.anchors()}
    path: list[Manifest] = []
    for manifest in _downwards(ledger, head, damage):
        if manifest.state_digest == live_state:
            return _plan(head, "live", None, path)
        if (manifest.version, manifest.epoch) in anchored:
            plan = _from_anchor(ledger, head, manifest, path, damage)
            if plan is not None:
                return plan
        path.append(manifest)
    return None


def _from_anchor(
    ledger: Ledger, head: Manifest, manifest: Manifest, path: list[Manifest], damage: list[DeltaSyncError]
) -> Plan | None:
    """The plan from one version's anchor; None, with the reason noted, if the anchor is damaged."""
    try:
        anchor = ledger.anchor(manifest)
        if anchor is None:
            return None
        plan = _plan(head, "anchor", anchor, path)
        if (got := state_digest(plan.tensors)) != head.state_digest:
            what = f"state after anchor {anchor.version} and its deltas"
            raise IntegrityError(what, expected=head.state_digest, got=got, remedy="attach a new anchor")
    except _DAMAGE as error:
        damage.append(error)
        return None
    return plan


def _downwards(ledger: Ledger, head: Manifest, damage: list[DeltaSyncError]) -> Iterator[Manifest]:
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
            if manifest.kind == "delta":  # an origin needs no parent
                damage.append(error)
            return
        if parent is None or (manifest.kind == "origin" and not _same_bits(manifest, parent)):
            return
        yield (manifest := parent)


def _same_bits(one: Manifest, other: Manifest) -> bool:
    return (one.state_digest, one.model_fingerprint) == (other.state_digest, other.model_fingerprint)


def _plan(head: Manifest, start: Start, anchor: AnchorRecord | None, path: list[Manifest]) -> Plan:
    """``path``: the versions after the start, newest first."""
    deltas = tuple(manifest for manifest in reversed(path) if manifest.kind == "delta")
    tensors: dict[str, TensorState] = dict(anchor.tensors) if anchor else {}
    for manifest in deltas:
        tensors.update(manifest.tensors)
    return Plan(head, start, anchor, deltas, tensors)


def _no_start(head: Manifest, damage: list[DeltaSyncError]) -> DeltaSyncError:
    """Damage that stood in the way says more than "no start"; a broken chain is a ChainError either way."""
    for error in damage:
        if isinstance(error, (FormatError, IntegrityError)):
            return error
    return ChainError(
        f"way to version {head.version}",
        expected="the replica's version or bits, or an anchor, on its chain",
        got="; ".join(error.what for error in damage) or "none of them",
        remedy="attach an anchor to the newest version",
    )
