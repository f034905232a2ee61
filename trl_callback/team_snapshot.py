"""Rank 0's view of all ranks' shards: every tensor's state."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from delta_sync.anchor_files import Head
from delta_sync.cover import check_cover
from delta_sync.dtypes import dtype
from delta_sync.errors import MappingError
from delta_sync.manifest import TensorState
from trl_callback.layout import Region
from trl_callback.past import Past
from trl_callback.shard_snapshot import ShardSnapshot
from trl_callback.snapshot import Snapshot


def describe(snapshot: ShardSnapshot) -> str:
    """What rank 0 needs to know of another rank's pieces, as JSON."""
    return json.dumps(
        [
            [piece.name, piece.dtype.name, piece.shape, asdict(piece.region), piece.digest()]
            for piece in snapshot
        ]
    )  # fmt: skip


class TeamSnapshot(Snapshot):
    """Every tensor's state, summed over the ranks' ``described`` pieces; the bits stay with the ranks.

    ``pieces``: by rank, each one's (tensor, region), in the order in which it sends them.
    Raises MappingError unless the pieces cover every tensor exactly once.
    """

    def __init__(self, described: Sequence[str]) -> None:
        self.states: dict[str, TensorState] = {}
        self.pieces: list[list[tuple[str, Region]]] = []
        regions: dict[str, list[Region]] = {}
        for text in described:
            self.pieces.append([])
            for name, kind, shape, region, digest in json.loads(text):
                where = Region(region["offset"], tuple(region["strides"]), tuple(region["shape"]))
                self.pieces[-1].append((name, where))
                regions.setdefault(name, []).append(where)
                self._add(name, TensorState(kind, tuple(shape), digest))
        for name, parts in regions.items():
            check_cover(name, self.states[name].shape, parts)
        self.total_elements = sum(math.prod(state.shape) for state in self.states.values())
        self.total_bytes = sum(math.prod(shape) * kind.itemsize for _, kind, shape in self.heads)

    def _add(self, name: str, part: TensorState) -> None:
        held = self.states.setdefault(name, TensorState(part.dtype, part.shape, 0))
        if (held.dtype, held.shape) != (part.dtype, part.shape):
            raise MappingError(f"tensor {name!r}", expected=f"{held.dtype} {list(held.shape)} on every rank",
                               got=f"{part.dtype} {list(part.shape)} on one")  # fmt: skip
        self.states[name] = TensorState(held.dtype, held.shape, (held.digest + part.digest) % 2**64)

    def moved(self, sums: Mapping[str, int]) -> dict[str, TensorState]:
        """The states of the tensors whose digests move by ``sums``."""
        before = {name: self.states[name] for name in sums}
        return {n: TensorState(s.dtype, s.shape, (s.digest + sums[n]) % 2**64) for n, s in before.items()}

    def apply(self, deltas: Mapping[str, Any], states: Mapping[str, TensorState]) -> None:
        """Move to the version just committed; the ranks have moved their bits."""
        self.states.update(states)

    @property
    def heads(self) -> list[Head]:
        """Name, element type and shape of every tensor, by name."""
        return [(name, dtype(state.dtype), state.shape) for name, state in sorted(self.states.items())]

    def remember(self) -> Past:
        """Nothing: no version is committed while an anchor is on its way."""
        return Past(dict.fromkeys(self.states, np.empty(0, np.uint16)), self.states)
