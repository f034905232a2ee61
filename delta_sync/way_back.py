"""The way from a version to an older one of its chain: the deltas between them, to be applied backwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.errors import ChainError
from delta_sync.manifest import Manifest, TensorState
from delta_sync.plan import Plan, Position
from delta_sync.planner import same_bits

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger


def plan_back(ledger: Ledger, target: Manifest, position: Position) -> Plan:
    """A "back" plan from ``position`` to ``target``, which must be an ancestor of it.

    ChainError if it is none, or if a delta between them can't be turned round: one that is coded against the older
    bits, or starts a chain anew from other bits. What a delta's values allow is seen only when it is decoded.
    """
    tip = ledger.manifest(position.version, position.manifest)
    between = [tip, *ledger.ancestors(tip, target.version)]
    if between[-1].sha256 != target.sha256:
        raise _no_way(target, position, f"version {between[-1].version} is another chain's")
    path = between[-2::-1]
    for older, manifest in zip(between[::-1], path, strict=False):
        if manifest.kind == "origin" and not same_bits(manifest, older):
            raise _no_way(target, position, f"version {manifest.version} starts a chain")
        if manifest.codec == CONTEXT_CODEC:
            raise _no_way(target, position, f"version {manifest.version} is coded against the bits before it")
    deltas = tuple(manifest for manifest in path if manifest.kind == "delta")
    touched = {name for manifest in deltas for name in manifest.tensors}
    return Plan(target, "back", None, deltas, _states(ledger, target, touched))


def _states(ledger: Ledger, target: Manifest, names: set[str]) -> dict[str, TensorState]:
    """The tensors' states at ``target``: what the last version that touched each says of it."""
    found: dict[str, TensorState] = {}
    manifest: Manifest | None = target
    while manifest is not None and (missing := names - found.keys()):
        found |= {name: manifest.tensors[name] for name in missing & manifest.tensors.keys()}
        manifest = None if manifest.kind == "origin" else ledger.parent(manifest)
    if missing := names - found.keys():
        raise ChainError(f"tensor {min(missing)!r}", expected=f"a state at version {target.version}", got="none")
    return found


def _no_way(target: Manifest, position: Position, got: str) -> ChainError:
    return ChainError(
        f"way back from version {position.version} to {target.version}",
        expected="deltas that can be applied backwards",
        got=got,
        remedy="attach an anchor to that version or one before it",
    )
