"""The versions this trainer publishes: one origin, then deltas, each durable before the next one starts."""

from __future__ import annotations

import tempfile
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from delta_sync.anchor_files import write_anchor_files
from delta_sync.context_file import encode_against
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, encode_delta
from delta_sync.errors import StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Kind, Manifest, TensorState
from delta_sync.writer import Writer
from trl_callback.changes import ChangeSet
from trl_callback.config import DeltaSyncConfig
from trl_callback.healing import Refusal, acknowledged_refusal
from trl_callback.progress import byte_bar, counted
from trl_callback.snapshot import Snapshot

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

KEPT_BYTES = 512 * 1024**2  # objects of recent versions held so that a damaged one can be put again


@dataclass(frozen=True)
class Published:
    """A durable version, its manifest's sha256, and the last optimizer step it covers."""

    version: int
    step: int
    sha256: str


@dataclass(frozen=True)
class Attempt:
    """A change set ready to be committed: encoded once, so that every try commits the same content."""

    changes: ChangeSet
    states: Mapping[str, TensorState]
    state_digest: str
    data: bytes
    codec: str


class Chain:
    """The writer's side of one epoch, begun with an origin at ``step``; one thread at a time.

    The snapshot is read, never moved, here. Raises ConflictError when another trainer took the bucket over,
    StoreError when the store fails (try again).
    """

    def __init__(
        self,
        ledger: Ledger,
        snapshot: Snapshot,
        config: DeltaSyncConfig,
        sidecars: Mapping[str, bytes],
        step: int,
        key: SigningKey | None = None,
    ) -> None:
        self._ledger, self._snapshot, self._config, self._sidecars = ledger, snapshot, config, sidecars
        self._writer = Writer.open(ledger, run=config.run, writer=config.writer, key=key)
        self.previous = self._writer.previous
        self._published: list[Published] = []
        self._kept: OrderedDict[int, tuple[Manifest, bytes]] = OrderedDict()
        self._anchored: int | None = None
        state = snapshot.digest_with({})
        self._manifest = self._commit("origin", (step, step), snapshot.states, state, changed=0)

    @property
    def epoch(self) -> int:
        """The epoch this trainer claimed."""
        return self._manifest.epoch

    @property
    def newest(self) -> Published:
        """The newest durable version of this epoch."""
        return self._published[-1]

    @property
    def anchored_or_first(self) -> int:
        """The newest version with complete weights in the bucket, else this epoch's first version."""
        return self._published[0].version if self._anchored is None else self._anchored

    def covering(self, step: int) -> Published | None:
        """The first version that covers ``step``, None while there is none."""
        index = bisect_left(self._published, step, key=lambda published: published.step)
        return self._published[index] if index < len(self._published) else None

    def by_version(self, version: int) -> Published | None:
        """This epoch's ``version``, None if it has no such version."""
        index = version - self._published[0].version
        return self._published[index] if 0 <= index < len(self._published) else None

    def prepare(self, changes: ChangeSet) -> Attempt:
        """Encode changes to the snapshot as the object of the next version."""
        base, states = self._manifest, self._snapshot.advanced(changes.deltas)
        header = DeltaHeader(base.run, base.version + 1, base.version, DEFAULT_CODEC)
        if self._config.codec == "context":
            header, data, _ = encode_against(header, list(self._snapshot.changes(changes.deltas)))
        else:
            data = encode_delta(header, list(changes.deltas.values()))
        return Attempt(changes, states, self._snapshot.digest_with(states), data, header.codec)

    def commit(self, attempt: Attempt) -> Published:
        """Make the attempt the next version; after a StoreError, call it again with the same attempt."""
        last, data = attempt.changes.step, attempt.data
        steps = (min(self.newest.step + 1, last), last)
        self._manifest = self._commit(
            "delta", steps, attempt.states, attempt.state_digest, data,
            changed=attempt.changes.changed, codec=attempt.codec,
        )  # fmt: skip
        self._keep(data)
        return self.newest

    def _commit(
        self,
        kind: Kind,
        steps: tuple[int, int],
        tensors: Mapping[str, TensorState],
        state: str,
        *data: bytes,
        changed: int,
        codec: str | None = None,
    ) -> Manifest:
        manifest = self._writer.commit(
            kind,
            steps,
            tensors,
            state,
            self._snapshot.fingerprint,
            data,
            changed=changed,
            total=self._snapshot.total_elements,
            codec=codec,
            prompt_cache=self._config.prompt_cache,
        )
        self._published.append(Published(manifest.version, steps[1], manifest.sha256))
        return manifest

    def _keep(self, data: bytes) -> None:
        """Hold the newest objects up to a bound, the newest one whatever its size."""
        self._kept[self._manifest.version] = (self._manifest, data)
        while len(self._kept) > 1 and sum(len(held) for _, held in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)

    def can_republish(self, version: int) -> bool:
        """Whether the version's objects are still held here."""
        return version in self._kept

    def republish(self, version: int) -> None:
        """Put a version's objects again."""
        manifest, data = self._kept[version]
        self._writer.republish(manifest, [data])

    def attach_anchor(self) -> int:
        """Attach complete weights, the snapshot's, to the newest version; returns their size in bytes."""
        with self._temporary_folder() as folder:
            files = self._weight_files(Path(folder))
            self._writer.attach_anchor(self._manifest, {**self._sidecars, **files}, self._snapshot.states)
        self._anchored = self._manifest.version
        return self._snapshot.total_bytes

    def _temporary_folder(self) -> tempfile.TemporaryDirectory[str]:
        try:
            return tempfile.TemporaryDirectory(prefix="delta-sync-anchor-")
        except OSError as error:
            raise self._no_room(error) from error

    def _no_room(self, error: OSError) -> StoreError:
        return StoreError(
            "temporary files of an anchor",
            expected=f"{self._snapshot.total_bytes} bytes in TMPDIR or the system's folder for temporary files",
            got=error.strerror,
            remedy="free disk space there, or set TMPDIR to a folder on a larger disk",
        )

    def _weight_files(self, folder: Path) -> dict[str, Path]:
        total = self._snapshot.total_bytes
        try:
            with byte_bar("delta-sync anchor", total, shown=self._config.progress) as advance:
                return write_anchor_files(folder, counted(self._snapshot, advance))
        except OSError as error:
            raise self._no_room(error) from error

    def acknowledged(self) -> dict[str, Refusal | None]:
        """Replica -> what it says, in the bucket, it would not take."""
        return {name: acknowledged_refusal(ack) for name, ack in self._ledger.acknowledgements().items()}
