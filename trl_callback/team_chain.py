"""Rank 0's view of all ranks' parts: their tensors' states, and versions made of one object from each."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from delta_sync.anchor_layout import AnchorLayout
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.cover import check_cover
from delta_sync.delta_file import DEFAULT_CODEC
from delta_sync.dtypes import dtype
from delta_sync.errors import MappingError, StoreError
from delta_sync.manifest import ObjectRef, TensorState
from trl_callback.chain import Attempt, Chain, Published
from trl_callback.changes import ChangeSet
from trl_callback.follower import raise_answer
from trl_callback.healing import Refusal
from trl_callback.layout import Region
from trl_callback.progress import byte_bar
from trl_callback.rank_part import Order, RankPart, Run, cut_runs
from trl_callback.shard_snapshot import ShardSnapshot
from trl_callback.snapshot import Snapshot
from trl_callback.team import Team

PING = 30.0  # seconds after which an order is given only so that no rank's wait for one reaches its limit


@dataclass(frozen=True)
class TeamChanges(ChangeSet):
    """What all ranks captured at a step; each holds its own part."""

    total: int = 0

    @property
    def changed(self) -> int:
        """How many elements changed, on all ranks."""
        return self.total


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
        self.total_elements = sum(int(np.prod(state.shape, dtype=np.int64)) for state in self.states.values())
        self.total_bytes = sum(
            int(np.prod(state.shape, dtype=np.int64)) * dtype(state.dtype).itemsize for state in self.states.values()
        )

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


class Crew:
    """Gives all ranks the same order, rank 0 included, and collects what came of it."""

    def __init__(self, team: Team, part: RankPart) -> None:
        self.team, self.part = team, part
        self._last = time.monotonic()

    def do(self, do: str, own: Callable[[], dict[str, Any]] | None = None, **said: Any) -> list[dict[str, Any]]:
        """Every rank's answer; raises the first failure once all have answered, so that the next order finds all."""
        self.team.order({"do": do, **said})
        failure: Exception | None = None
        answers: list[dict[str, Any]] = [{}]
        try:
            answers[0] = own() if own is not None else self.part.obey(do, **said)
        except Exception as error:  # noqa: BLE001 (raised below)
            failure = error
        answers += self.team.answers()
        self._last = time.monotonic()
        if failure is not None:
            raise failure
        for rank, answer in enumerate(answers):
            raise_answer(rank, answer)
        return answers

    def dismiss(self) -> None:
        """End the other ranks' threads."""
        self.team.order({"do": "stop"})

    def ping(self) -> None:
        """Show that rank 0 is there."""
        if time.monotonic() - self._last >= PING:
            self.do("ping")


class TeamChain(Chain):
    """A chain whose objects the ranks encode and store themselves, each its own."""

    _snapshot: TeamSnapshot

    def __init__(self, crew: Crew, *args: Any) -> None:
        super().__init__(*args)
        self._crew, self._checked = crew, False

    def prepare(self, changes: ChangeSet) -> Attempt:
        """Have every rank store its part of the next version; after a StoreError, call it again."""
        base = self._manifest
        order = Order(base.run, base.version + 1, self._writer.epoch, changes.step)
        answers = self._crew.do("store", **asdict(order))
        sums: dict[str, int] = {}
        for answer in answers:
            for name, change in answer["sums"].items():
                sums[name] = (sums.get(name, 0) + change) % 2**64
        objects = [ObjectRef(**answer["object"]) for answer in answers if answer["object"] is not None]
        self._check_one_store(objects)
        states = self._snapshot.moved(sums)
        codecs = {answer["codec"] for answer in answers if answer["object"] is not None}
        codec = CONTEXT_CODEC if CONTEXT_CODEC in codecs else DEFAULT_CODEC
        return Attempt(changes, states, self._snapshot.digest_with(states), tuple(objects), codec)

    def _check_one_store(self, objects: Sequence[ObjectRef]) -> None:
        """Once, see what the others stored: a local folder on another machine is not the bucket."""
        if self._checked or not objects:
            return
        found = {info.key for info in self._ledger.store.list(objects[0].key.rpartition("-")[0])}
        for ref in objects:
            if ref.key not in found:
                raise StoreError(
                    f"object {ref.key}", expected="what another rank stored, in rank 0's store", got="none",
                    remedy="give all ranks one bucket: a folder must be on a file system that all of them share",
                )  # fmt: skip
        self._checked = True

    def commit(self, attempt: Attempt) -> Published:
        """Make the attempt the next version, and the ranks' snapshots move; after a StoreError, call it again."""
        published = super().commit(attempt)
        self._crew.do("move", version=published.version)
        return published

    def republish(self, version: int) -> None:
        """Have every rank put its object of a version again."""
        self._crew.do("republish", version=version)
        super().republish(version)

    def acknowledged(self) -> dict[str, Refusal | None]:
        """As in Chain; comes by every few seconds when nothing else does, so it also keeps the ranks together."""
        self._crew.ping()
        return super().acknowledged()

    def _weight_files(self, folder: Path) -> dict[str, Path]:
        """The ranks' pieces, a run at a time, each written at its place: no rank ever holds a whole tensor."""
        try:
            layout = AnchorLayout(folder, self._snapshot.states)
            with byte_bar("delta-sync anchor", self._snapshot.total_bytes, shown=self._config.progress) as advance:
                self._crew.do("anchor", lambda: self._collect(layout, advance))
        except OSError as error:
            raise self._no_room(error) from error
        return layout.files

    def _collect(self, layout: AnchorLayout, advance: Callable[[int], object]) -> dict[str, Any]:
        """Write what each rank sends; what was sent is received also where it can't be written."""
        failure: OSError | None = None
        for name, region, first, bits in self._runs():
            try:
                if failure is None:
                    _write(layout, name, region, first, bits)
            except OSError as error:
                failure = error
            advance(bits.nbytes)
        if failure is not None:
            raise failure
        return {}

    def _runs(self) -> Iterator[Run]:
        yield from self._crew.part.runs()
        for rank, pieces in enumerate(self._snapshot.pieces[1:], 1):
            for name, region in pieces:
                kind = dtype(self._snapshot.states[name].dtype)
                for first, size in cut_runs(region.size, kind.itemsize):
                    bits = np.empty(size, kind.carrier)
                    self._crew.team.receive_bits(rank, bits)
                    yield name, region, first, bits


def _write(layout: AnchorLayout, name: str, region: Region, first: int, bits: np.ndarray) -> None:
    tensor = layout.tensor(name)
    if region.is_run:
        tensor[region.offset + first : region.offset + first + bits.size] = bits
        return
    for at in range(0, bits.size, 2**20):  # positions take 8 bytes each
        some = bits[at : at + 2**20]
        tensor[region.positions(np.arange(first + at, first + at + some.size))] = some
