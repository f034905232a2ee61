"""Versions made of one object from each rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from delta_sync.errors import StoreError
from delta_sync.manifest import ObjectRef
from trl_callback.chain import Attempt, Chain, Published
from trl_callback.changes import ChangeSet
from trl_callback.crew import Crew
from trl_callback.parts import codec_of_all
from trl_callback.rank_part import Order
from trl_callback.team_anchor import TeamAnchorJob
from trl_callback.team_snapshot import TeamSnapshot


@dataclass(frozen=True)
class TeamChanges(ChangeSet):
    """What all ranks captured at a step; each holds its own part."""

    total: int = 0

    @property
    def changed(self) -> int:
        """How many elements changed, on all ranks."""
        return self.total


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
        codec = codec_of_all(answer["codec"] for answer in answers if answer["object"] is not None)
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

    def _begin_anchor(self) -> TeamAnchorJob:
        return TeamAnchorJob(
            self._crew, self._writer, self._manifest, self._snapshot, self._sidecars, progress=self._config.progress
        )

    def idle(self) -> None:
        """Keep the ranks together; not before the publisher's thread runs, as the others don't listen until then."""
        self._crew.ping()
