"""How a replica gets from what it has to the newest version, in a form that travels between processes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast

from delta_sync.errors import FormatError
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.manifest import AnchorRecord, Manifest, TensorState, tensors_from_json, tensors_to_json
from delta_sync.strict_json import Fields, dumps

Start = Literal["position", "live", "anchor"]


@dataclass(frozen=True)
class Position:
    """Where a replica is: a version, and the sha256 hex of its manifest."""

    version: int
    manifest: str


@dataclass(frozen=True)
class Plan:
    """Begin at ``start``, apply the objects of ``deltas`` in order, and be at ``target``.

    ``start``: "position" (the bits the replica serves as of its position), "live" (those bits are some version's,
    proven by their state digest) or "anchor" (complete weights of ``anchor``, taken first).
    ``tensors``: every tensor that anchor and deltas touch, with its state at ``target``.
    """

    target: Manifest
    start: Start
    anchor: AnchorRecord | None
    deltas: tuple[Manifest, ...]
    tensors: Mapping[str, TensorState]

    @property
    def position(self) -> Position:
        """Where the replica will be."""
        return Position(self.target.version, self.target.sha256)


def plan_to_dict(plan: Plan) -> dict[str, object]:
    """The plan as plain JSON values."""
    return {
        "target": _to_json(plan.target),
        "start": plan.start,
        "anchor": None if plan.anchor is None else _to_json(plan.anchor),
        "deltas": [_to_json(manifest) for manifest in plan.deltas],
        "tensors": tensors_to_json(plan.tensors),
    }


def plan_from_dict(value: object, *, limits: Limits = DEFAULT_LIMITS) -> Plan:
    """The inverse of plan_to_dict; FormatError."""
    fields = Fields(value, "plan")
    start = cast(Start, fields.choice("start", ("position", "live", "anchor")))
    anchor = fields.get("anchor")
    if (anchor is None) != (start != "anchor"):
        fields.fail("anchor", "an anchor record exactly if start is 'anchor'", "none" if anchor is None else start)
    return Plan(
        target=_manifest(fields.get("target"), limits),
        start=start,
        anchor=None if anchor is None else AnchorRecord.from_bytes(_bytes(anchor, "anchor"), limits=limits),
        deltas=tuple(_manifest(item, limits) for item in fields.array("deltas", limits.chain)),
        tensors=tensors_from_json(fields.get("tensors"), "plan", limits=limits),
    )


def _to_json(document: Manifest | AnchorRecord) -> object:
    return json.loads(document.to_bytes())


def _manifest(value: object, limits: Limits) -> Manifest:
    return Manifest.from_bytes(_bytes(value, "manifest"), limits=limits)


def _bytes(value: object, what: str) -> bytes:
    if not isinstance(value, dict):
        raise FormatError(f"plan: {what}", expected="a JSON object", got=type(value).__name__)
    return dumps(value)
