"""Complete weights from several ranks: each sends its pieces, rank 0 writes them into one file after the other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from delta_sync.anchor_files import Head
from delta_sync.dtypes import dtype
from delta_sync.manifest import Manifest
from delta_sync.open_shard import OpenShard
from delta_sync.writer import Writer
from trl_callback.anchor_job import AnchorJob
from trl_callback.crew import Crew
from trl_callback.layout import Region
from trl_callback.rank_part import Run, cut_runs
from trl_callback.team_snapshot import TeamSnapshot


class TeamAnchorJob(AnchorJob):
    """An anchor of the newest version; no version is committed while one is on its way, so ranks remember nothing.

    No rank holds a whole tensor, and rank 0 no more than a run of one: files are on its disk, one at a time.
    """

    def __init__(
        self, crew: Crew, writer: Writer, manifest: Manifest, snapshot: TeamSnapshot, sidecars: Mapping[str, bytes],
        *, progress: bool | None,
    ) -> None:  # fmt: skip
        self._crew, self._team_snapshot = crew, snapshot
        super().__init__(writer, manifest, snapshot, sidecars, progress=progress)

    @property
    def must_go_on(self) -> bool:
        """The next shard always comes before the next version."""
        return True

    def _write(self, path: Path, heads: list[Head]) -> None:
        shard = OpenShard(path, heads)
        names = [name for name, *_ in heads]
        self._crew.do("anchor", lambda: self._collect(shard, names), names=names)

    def _collect(self, shard: OpenShard, names: list[str]) -> dict[str, Any]:
        """Write what each rank sends; what was sent is received also where it can't be written."""
        failure: OSError | None = None
        for name, region, first, bits in self._runs(names):
            try:
                if failure is None:
                    _write_run(shard, name, region, first, bits)
            except OSError as error:
                failure = error
            self._advance_bar(bits.nbytes)
        if failure is not None:
            raise failure
        return {}

    def _runs(self, names: list[str]) -> Iterator[Run]:
        wanted = frozenset(names)
        yield from self._crew.part.runs(wanted)
        for rank, pieces in enumerate(self._team_snapshot.pieces[1:], 1):
            for name, region in pieces:
                if name in wanted:
                    yield from self._received(rank, name, region)

    def _received(self, rank: int, name: str, region: Region) -> Iterator[Run]:
        kind = dtype(self._team_snapshot.states[name].dtype)
        for first, size in cut_runs(region.size, kind.itemsize):
            bits = np.empty(size, kind.carrier)
            self._crew.team.receive_bits(rank, bits)
            yield name, region, first, bits


def _write_run(shard: OpenShard, name: str, region: Region, first: int, bits: np.ndarray) -> None:
    tensor = shard.tensor(name)
    if region.is_run:
        tensor[region.offset + first : region.offset + first + bits.size] = bits
        return
    for at in range(0, bits.size, 2**20):  # positions take 8 bytes each
        some = bits[at : at + 2**20]
        tensor[region.positions(np.arange(first + at, first + at + some.size))] = some
