"""The versions this trainer publishes: one origin, then deltas, each durable before the next one starts."""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING

from delta_sync import tracing
from delta_sync.aside import aside
from delta_sync.context_file import encode_deltas_against
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, encode_delta
from delta_sync.gap_codec import codec_without_base
from delta_sync.ledger import Ledger
from delta_sync.manifest import Kind, Manifest, ObjectRef, TensorState
from delta_sync.retention import delete, find_trim
from delta_sync.tensor_delta import TensorDelta
from delta_sync.writer import Writer, object_ref
from trl_callback.anchor_job import AnchorJob
from trl_callback.changes import ChangeSet
from trl_callback.config import DeltaSyncConfig
from trl_callback.healing import Refusal, acknowledged_refusal
from trl_callback.parts import Parts, codec_of_all
from trl_callback.snapshot import Snapshot

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

DELETED_AT_ONCE = 32  # objects between two versions
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
    objects: tuple[ObjectRef, ...]  # stored already
    codec: str | None
    kept: tuple[bytes, ...] = ()  # the objects themselves, where this rank has them
    metrics: Mapping[str, float] = field(default_factory=dict)  # of the training log, for the manifest
    total: int | None = None  # elements that ``changes`` are some of; None: the model's

    @property
    def size(self) -> int:
        """Bytes of all objects."""
        return sum(ref.size for ref in self.objects)


class Chain:
    """The writer's side of one epoch, begun with an origin at ``step``; one thread at a time.

    The snapshot is read, never moved, here. Raises ConflictError when another trainer took the bucket over,
    StoreError when the store fails (try again).
    """

    kind: Kind = "delta"  # of the versions after the origin

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
        self._key = key
        self._writer = self._open()
        self.previous, self.after_reset = self._writer.previous, self._writer.after_reset
        self._published: list[Published] = []
        self._kept: OrderedDict[int, tuple[Manifest, tuple[bytes, ...] | tuple[ObjectRef, ...]]] = OrderedDict()
        self._parts: Parts | None = None  # of a change set that could not be stored yet
        self._bytes = self._anchored_bytes = 0  # of all deltas of this epoch, of those up to the newest anchor
        self._job: AnchorJob | None = None
        self._job_bytes = 0
        self._anchored: int | None = None
        self._old: tuple[str, ...] = ()  # keys that are about to be deleted
        self._manifest = self._origin(step)

    def _open(self) -> Writer:
        ledger = self._ledger.unread()  # a try of a moment ago may have committed what HEAD does not say
        return Writer.open(ledger, run=self._config.run, writer=self._config.writer, key=self._key)

    def _origin(self, step: int) -> Manifest:
        snapshot = self._snapshot
        state = snapshot.digest_with({})
        trace = tracing.begin("delta_sync.publish", step=step)
        with trace.current():
            origin = self._commit(
                "origin", (step, step), snapshot.states, state, changed=0, traceparent=trace.traceparent
            )
        trace.end(run=origin.run, version=origin.version)
        return origin

    def begin_again(self) -> None:
        """After a reset: go on in a new epoch, with an origin of what was published last; StoreError: call it again."""
        self.abandon_anchor()
        self._writer = self._open()
        self._manifest = self._origin(self.newest.step)
        self._anchored, self._anchored_bytes = self._manifest.version, self._bytes

    @property
    def epoch(self) -> int:
        """The epoch this trainer claimed."""
        return self._writer.epoch

    @property
    def newest(self) -> Published:
        """The newest durable version of this epoch."""
        return self._published[-1]

    @property
    def goes_on(self) -> bool:
        """Whether there were versions before this epoch's."""
        return self._published[0].version > 1

    @property
    def _anchored_or_first(self) -> int:
        """The newest version with complete weights in the bucket, else this epoch's first version."""
        return self._published[0].version if self._anchored is None else self._anchored

    def covering(self, step: int) -> Published | None:
        """The first version that covers ``step``, None while there is none."""
        index = bisect_left(self._published, step, key=lambda published: published.step)
        return self._published[index] if index < len(self._published) else None

    def by_version(self, version: int) -> Published | None:
        """This epoch's ``version``, None if it has no such version."""
        index = bisect_left(self._published, version, key=lambda published: published.version)
        found = self._published[index] if index < len(self._published) else None
        return found if found is not None and found.version == version else None

    def begin_early(self) -> Parts | None:
        """As ``begin``, for a capture that may store objects while it goes on; None: it may not."""
        return self.begin()

    def begin(self) -> Parts:
        """The next version's objects, to be filled with changes to the snapshot as they are found."""
        base, epoch = self._manifest, self._writer.epoch
        header = DeltaHeader(base.run, base.version + 1, base.version, DEFAULT_CODEC)

        def put(data: bytes) -> ObjectRef:
            ref = object_ref(header.version, epoch, data)
            self._ledger.store.put(ref.key, data)
            return ref

        return Parts(partial(self._encode, header), put, self._config.bucket_bytes, header.version)

    def _encode(self, header: DeltaHeader, deltas: Sequence[TensorDelta]) -> tuple[bytes, str]:
        if self._config.codec != "context":
            header = replace(header, codec=codec_without_base(deltas))
            return encode_delta(header, deltas), header.codec
        grid = (self._config.tiles, self._config.tiles)
        coded, data = encode_deltas_against(header, deltas, self._snapshot.bits, grid)
        return data, coded.codec

    def prepare(self, changes: ChangeSet) -> Attempt:
        """Encode and store changes to the snapshot as objects of the next version; after a StoreError, call it again.

        Those that were stored before stay: with the changes come the objects begun while they were found, if any.
        """
        parts = changes.parts if self._parts is None else self._parts
        if parts is None or parts.version != self._manifest.version + 1:
            parts = self.begin()
            for delta in changes.deltas.values():
                parts.add(delta)
        self._parts = parts
        alone = aside(self._writer.look_around, "delta-sync-fence")  # this and the digests take no time of their own
        states = self._snapshot.advanced(changes.deltas)
        state = self._snapshot.digest_with(states)
        stored = parts.finish()
        alone.result()
        self._parts = None
        if stored:
            began, ended = min(one.began for one in stored), max(one.ended for one in stored)
            size = sum(one.ref.size for one in stored)
            changes.trace.child("delta_sync.publish.upload", began, ended, objects=len(stored), bytes=size)
        codec = codec_of_all(one.codec for one in stored)
        refs, kept = tuple(one.ref for one in stored), tuple(one.data for one in stored)
        return Attempt(changes, states, state, refs, codec, kept)

    def commit(self, attempt: Attempt) -> Published:
        """Make the attempt the next version; after a StoreError, call it again with the same attempt."""
        last = attempt.changes.step
        steps = (min(self.newest.step + 1, last), last)
        self._manifest = self._commit(
            self.kind, steps, attempt.states, attempt.state_digest, *attempt.objects,
            changed=attempt.changes.changed, total=attempt.total, codec=attempt.codec, metrics=attempt.metrics,
            traceparent=attempt.changes.trace.traceparent,
        )  # fmt: skip
        self._bytes += attempt.size
        self._keep(attempt.kept or attempt.objects)
        return self.newest

    def _commit(
        self,
        kind: Kind,
        steps: tuple[int, int],
        tensors: Mapping[str, TensorState],
        state: str,
        *objects: ObjectRef,
        changed: int,
        total: int | None = None,
        codec: str | None = None,
        metrics: Mapping[str, float] | None = None,
        traceparent: str | None = None,
    ) -> Manifest:
        manifest = self._writer.commit(
            kind,
            steps,
            tensors,
            state,
            self._snapshot.fingerprint,
            objects,
            changed=changed,
            total=self._snapshot.total_elements if total is None else total,
            codec=codec,
            prompt_cache=self._config.prompt_cache,
            metrics=metrics,
            traceparent=traceparent,
        )
        self._published.append(Published(manifest.version, steps[1], manifest.sha256))
        return manifest

    def _keep(self, objects: tuple[bytes, ...] | tuple[ObjectRef, ...]) -> None:
        """Hold the newest objects up to a bound, the newest one whatever its size."""
        self._kept[self._manifest.version] = (self._manifest, objects)
        sizes = [sum(ref.size for ref in manifest.objects) for manifest, _ in self._kept.values()]
        while len(self._kept) > 1 and sum(sizes) > KEPT_BYTES:
            self._kept.popitem(last=False)
            sizes.pop(0)

    def can_republish(self, version: int) -> bool:
        """Whether the version's objects are still held here."""
        return version in self._kept

    def republish(self, version: int) -> None:
        """Put a version's objects again."""
        self._writer.republish(*self._kept[version])

    @property
    def anchor_is_due(self) -> bool:
        """Whether so many versions came since the newest anchor, or their deltas are so large a part of one's size."""
        every, ratio = self._config.anchor_every, self._config.anchor_chain_ratio
        by_number = every > 0 and self.newest.version - self._anchored_or_first >= every
        by_bytes = ratio > 0 and self._bytes - self._anchored_bytes > ratio * self._snapshot.total_bytes
        return by_number or by_bytes

    @property
    def anchor_bytes(self) -> int:
        """The size of complete weights."""
        return self._snapshot.total_bytes

    @property
    def anchor_must_go_on(self) -> bool:
        """Whether an anchor is on its way whose next shard has to come before the next version."""
        return self._job is not None and self._job.must_go_on

    def advance_anchor(self, *, newest: bool = False) -> AnchorJob | None:
        """Begin an anchor of the newest version, or upload the next shard of the one on its way; it, once complete.

        ``newest``: one of an older version is given up for one of the newest.
        """
        if self._job is not None and newest and self._job.version != self._manifest.version:
            self.abandon_anchor()
        if self._job is None:
            self._job, self._job_bytes = self._begin_anchor(), self._bytes
        job = self._job
        if not job.advance():
            return None
        self._job, self._anchored, self._anchored_bytes = None, job.version, self._job_bytes
        return job

    def _begin_anchor(self) -> AnchorJob:
        return AnchorJob(self._writer, self._manifest, self._snapshot, self._sidecars, progress=self._config.progress)

    def abandon_anchor(self) -> None:
        """Give up the anchor on its way, if any."""
        job, self._job = self._job, None
        if job is not None:
            job.abandon()

    def trim(self) -> bool:
        """Find what ``keep_anchors`` lets go, or delete the next few objects of what was found; whether some are left.

        StoreError; ChainError, FormatError or IntegrityError where damage hides what is still needed.
        """
        if not self._old:
            trim = find_trim(self._ledger, self._config.keep_anchors or 1, self._config.keep_grace)
            for version in [kept for kept in self._kept if kept < (trim.first_kept or 0)]:
                del self._kept[version]  # a version that is gone is not to be put again
            self._old = trim.keys
            return bool(self._old)
        now, self._old = self._old[:DELETED_AT_ONCE], self._old[DELETED_AT_ONCE:]
        delete(self._ledger.store, now)
        return bool(self._old)

    def idle(self) -> None:
        """What the publisher's thread does every few seconds when nothing else is due."""

    def acknowledged(self) -> dict[str, Refusal | None]:
        """Replica -> what it says, in the bucket, it would not take."""
        return {name: acknowledged_refusal(ack) for name, ack in self._ledger.acknowledgements().items()}
