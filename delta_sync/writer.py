"""The one writer of a run: claims an epoch, commits versions, attaches anchors.

Fencing. An epoch is claimed with a create-only write before its writer reads what it continues. A commit looks for a
newer claim before it starts and again once its manifest is durable. So a commit that returned is part of the run for
good: whoever claims later reads it. A commit that raised may or may not have happened; calling it again settles it.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from delta_sync import tracing
from delta_sync.anchor_writer import AnchorUpload, Content, attach_anchor
from delta_sync.aside import aside
from delta_sync.claims import claim_epoch, create_or_read, default_writer, reset_pending
from delta_sync.digest import model_fingerprint, state_digest
from delta_sync.errors import (
    ChainError,
    ConflictError,
    FormatError,
    IntegrityError,
    NotFoundError,
    ResetError,
    StoreError,
)
from delta_sync.ledger import Ledger
from delta_sync.manifest import AnchorRecord, Kind, Manifest, ObjectRef, PromptCache, TensorState
from delta_sync.plan import Position
from delta_sync.records import RECORD_BYTES, Epoch, Head
from delta_sync.signing import sign
from delta_sync.store.base import Store
from delta_sync.store.keys import HEAD, adapter_key, delta_key, manifest_prefix, parse_manifest_key

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey

log = logging.getLogger(__name__)


class Writer:
    """Commits the versions of one epoch; calls from several threads are taken one at a time.

    ``previous`` is the version that this epoch continues, ``head`` the newest committed one (None in an empty run).
    ``after_reset``: an operator had the chain forgotten, so the origin that comes now is to get complete weights.
    ``head_error`` is why the HEAD hint could not be written last time, or None; the next commit writes it again.
    With ``key`` every record that it writes is signed.
    """

    def __init__(
        self,
        ledger: Ledger,
        claim: Epoch,
        previous: Manifest | None,
        base: Position | None,
        key: SigningKey | None = None,
    ) -> None:
        self.ledger, self.claim, self.previous, self.head = ledger, claim, previous, previous
        self.head_error: StoreError | None = None
        self.after_reset = reset_pending(ledger, previous.epoch if previous else 0, claim.epoch)
        self._key = key
        self._base = base  # where the next version attaches; known even if the manifest there cannot be read
        self._attempt: Epoch | None = None  # a claim whose answer was lost
        self._tensors: dict[str, TensorState] | None = None
        self._looked = False
        self._lock = threading.RLock()

    @classmethod
    def open(
        cls, ledger: Ledger, run: str | None = None, writer: str | None = None, *, key: SigningKey | None = None
    ) -> Writer:
        """Claim a new epoch and continue the run; ConflictError if the store holds another run than ``run``.

        Where the run's newest version is damaged, or not signed with a key that ``ledger`` pins, ``previous`` is None
        and an origin goes on after it.
        """
        claim = claim_epoch(ledger, run, writer or default_writer(), key)
        try:
            previous = ledger.head()
        except (ChainError, FormatError, IntegrityError) as error:
            log.warning("the run's newest version cannot be read, an origin will follow it: %s", error)
            return cls(ledger, claim, None, ledger.highest_listed(), key)
        return cls(ledger, claim, previous, Position(previous.version, previous.sha256) if previous else None, key)

    @property
    def run(self) -> str:
        """The run's name, kept over all epochs."""
        return self.claim.run

    @property
    def epoch(self) -> int:
        """The epoch that this writer holds."""
        return self.claim.epoch

    @property
    def writer(self) -> str:
        """This writer's name, unique to the process."""
        return self.claim.writer

    @property
    def next_version(self) -> int:
        """The version that the next commit makes."""
        return self._base.version + 1 if self._base else 1

    def commit(
        self,
        kind: Kind,
        steps: tuple[int, int],
        tensors: Mapping[str, TensorState],
        all_state_digest: str,
        fingerprint: str,
        objects: Sequence[bytes | ObjectRef],
        *,
        changed: int,
        total: int,
        codec: str | None,
        prompt_cache: PromptCache,
        metrics: Mapping[str, float] | None = None,
        traceparent: str | None = None,
    ) -> Manifest:
        """Make one version durable and visible: objects first, then the manifest, then the HEAD hint.

        ``tensors``: state after this version of every tensor (origin), of those that ``objects`` touch (delta), or of
        the adapter's.
        ``objects``: bytes to store, or references to objects that are stored already, by a trainer's other ranks.
        ``changed`` and ``total`` count elements; ``metrics`` and ``traceparent`` are kept in the manifest.
        Raises ConflictError if another writer took over, StoreError if the store failed (call again with the same
        arguments), IntegrityError if ``tensors`` contradict the digests, FormatError, and ChainError for a delta or
        an adapter where there is nothing to change.
        """
        with self._lock:
            if kind != "origin" and self.head is None:
                got = "no readable version before it"
                raise ChainError(
                    f"{kind} version {self.next_version}",
                    expected="a version to change",
                    got=got,
                    remedy="commit an origin",
                )
            version = self.next_version
            manifest = Manifest(
                run=self.run,
                epoch=self.epoch,
                writer=self.writer,
                version=version,
                kind=kind,
                base_version=None if kind == "origin" else version - 1,
                parent=self._base.manifest if self._base else None,
                steps=steps,
                objects=tuple(_object_refs(version, self.epoch, objects)),
                tensors=dict(tensors),
                state_digest=all_state_digest,
                model_fingerprint=fingerprint,
                changed_elements=changed,
                total_elements=total,
                codec=codec,
                prompt_cache=prompt_cache,
                created_at=time.time(),
                metrics=dict(metrics or {}),
                traceparent=traceparent,
            )
            return self._commit(manifest, objects)

    def look_around(self) -> None:
        """Look for another writer, so that the next ``commit`` need not before it begins; ConflictError, StoreError.

        It looks again once its manifest is there: what is found only then was too late to be found before.
        """
        self._check_fence()
        self._looked = True

    def _commit(self, manifest: Manifest, objects: Sequence[bytes | ObjectRef]) -> Manifest:
        manifest.to_bytes()  # FormatError before anything is written
        after = self._check_states(manifest)
        if not self._looked:
            self._check_fence()
        self._looked = False  # whatever comes of this attempt, the next one looks again
        if any(not isinstance(data, ObjectRef) for data in objects):
            size = sum(ref.size for ref in manifest.objects)
            with tracing.span("delta_sync.publish.upload", objects=len(objects), bytes=size):
                self._put_objects(manifest, objects)
        with tracing.span("delta_sync.publish.commit", version=manifest.version):
            manifest = self._create(replace(manifest, epoch=self.epoch))
            self._check_fence(manifest)
        self.head, self._base, self._tensors = manifest, Position(manifest.version, manifest.sha256), after
        self.write_head()
        return manifest

    def attach_anchor(
        self, manifest: Manifest, files: Mapping[str, Content], tensors: Mapping[str, TensorState]
    ) -> AnchorRecord:
        """Store a checkpoint folder's ``files`` (name -> path or bytes) as the complete weights of a version.

        ``tensors`` lists every tensor's state; IntegrityError unless it is the version's. The record is written last,
        so that an interrupted call leaves no anchor; call it again.
        """
        self._check_fence()
        record = attach_anchor(self._store, manifest, files, tensors, self._key)
        self._restore(manifest)
        return record

    def begin_anchor(
        self, manifest: Manifest, names: Collection[str], tensors: Mapping[str, TensorState]
    ) -> AnchorUpload:
        """The same file by file, with commits in between: ``put`` each of ``names``, then ``finish_anchor``."""
        self._check_fence()
        return AnchorUpload(self._store, manifest, names, tensors, self._key)

    def finish_anchor(self, upload: AnchorUpload) -> AnchorRecord:
        """Make a complete upload visible; raises what ``attach_anchor`` raises."""
        self._check_fence()
        record = upload.finish()
        self._restore(upload.manifest)
        return record

    def _put_objects(self, manifest: Manifest, objects: Sequence[bytes | ObjectRef]) -> None:
        for ref, data in zip(manifest.objects, objects, strict=True):
            if not isinstance(data, ObjectRef):
                self._store.put(ref.key, data)

    def republish(self, manifest: Manifest, objects: Sequence[bytes | ObjectRef]) -> None:
        """Write a version's objects, and what else of it is damaged, again; IntegrityError if they are other bytes.

        References stand for objects that were stored again already.
        """
        if len(objects) != len(manifest.objects):
            what = f"objects of version {manifest.version}"
            raise IntegrityError(what, expected=len(manifest.objects), got=len(objects))
        for ref, data in zip(manifest.objects, objects, strict=True):
            got = data.sha256 if isinstance(data, ObjectRef) else hashlib.sha256(data).hexdigest()
            if got != ref.sha256:
                raise IntegrityError(f"object {ref.key}", expected=ref.sha256, got=got)
        self._check_fence()
        self._put_objects(manifest, objects)
        self._restore(manifest)

    def _restore(self, manifest: Manifest) -> None:
        """Write a manifest of ours again where its bytes are not there, and HEAD, which may name others."""
        data = manifest.to_bytes()
        try:
            whole = self._store.get(manifest.key, max_bytes=len(data)) == data
        except (NotFoundError, IntegrityError):
            whole = False
        if not whole:
            self._store.put(manifest.key, data)
        self.write_head()

    def write_head(self) -> None:
        """Write the HEAD hint; a failure is kept in ``head_error``, as the committed version is visible without it."""
        head = self.head
        if head is None:
            return
        hint = sign(Head(head.run, head.epoch, head.writer, head.version, head.sha256), self._key)
        try:
            self._store.put(HEAD, hint.to_bytes())
            self.head_error = None
        except StoreError as error:
            self.head_error = error
            log.warning("version %d is committed, but HEAD could not be written: %s", head.version, error)

    @property
    def _store(self) -> Store:
        return self.ledger.store

    def _check_states(self, manifest: Manifest) -> dict[str, TensorState] | None:
        """All tensors' states after this version where they are known, proven against its digests."""
        if manifest.kind != "origin" and self._tensors is None:
            return None  # continuing a run without an origin of our own: its other tensors are not at hand
        known = self._tensors or {} if manifest.kind != "origin" else {}
        after = {**known, **manifest.tensors} if manifest.kind != "adapter" else known
        what = f"version {manifest.version}"
        for name, got, expected in (
            ("state digest", state_digest(after), manifest.state_digest),
            ("model fingerprint", model_fingerprint(after), manifest.model_fingerprint),
        ):
            if got != expected:
                raise IntegrityError(f"{name} of {what}", expected=f"{expected} as given", got=f"{got} from tensors")
        return after

    def _create(self, manifest: Manifest) -> Manifest:
        """Sign the manifest and make it durable, whatever became of an earlier attempt to."""
        manifest = sign(manifest, self._key)
        existing = create_or_read(self._store, manifest.key, manifest.to_bytes(), self.ledger.limits.manifest_bytes)
        if existing is None:
            return manifest
        earlier = _parse_or_none(existing)
        if earlier is not None and self._same_but_for_time(earlier, manifest):
            return earlier  # an earlier attempt whose answer was lost had succeeded
        # Lost too, but with other contents: the caller has moved on. A higher epoch takes this version over.
        self._attempt = sign(Epoch(self.run, self.epoch + 1, self.writer, time.time()), self._key)
        if create_or_read(self._store, self._attempt.key, self._attempt.to_bytes(), RECORD_BYTES) is not None:
            self._check_fence()
        self.claim = self._attempt
        return self._create(replace(manifest, epoch=self.epoch))

    def _same_but_for_time(self, earlier: Manifest, manifest: Manifest) -> bool:
        ours = sign(earlier, self._key) == earlier  # signatures are deterministic: another one is not ours
        return ours and sign(replace(earlier, created_at=manifest.created_at), self._key) == manifest

    def _check_fence(self, manifest: Manifest | None = None) -> None:
        """ConflictError if our claim is gone, or another writer claimed a newer epoch or committed the same version."""
        claimed = aside(partial(self._claim_after, self.epoch, manifest))  # both looks at once
        self._check_own_claim(manifest)
        while (newer := claimed.result()) is not None:
            if newer.reset:
                raise self._reset(newer, manifest)
            if newer != self._attempt:
                raise self._taken_over(f"writer {newer.writer!r}, who claimed epoch {newer.epoch}", manifest)
            self.claim = newer
            claimed = aside(partial(self._claim_after, self.epoch, manifest))
        if manifest is None:
            return
        for info in self._store.list(manifest_prefix(manifest.version)):
            name = parse_manifest_key(info.key)
            if name and name.epoch >= self.epoch and name.writer != self.writer:
                raise self._taken_over(f"writer {name.writer!r}, who committed {name.key}", manifest)

    def _reset(self, claim: Epoch, manifest: Manifest | None) -> ConflictError:
        """ResetError, unless another writer goes on behind the reset already."""
        while (newer := self._claim_after(claim.epoch, manifest)) is not None:
            if not newer.reset:
                return self._taken_over(f"writer {newer.writer!r}, who claimed epoch {newer.epoch}", manifest)
            claim = newer
        got = f"a reset, epoch {claim.epoch}"
        return ResetError(f"run {self.run}", expected=f"epoch {self.epoch} to go on", got=got,
                          remedy="open the run again: the next version is an origin")  # fmt: skip

    def _check_own_claim(self, manifest: Manifest | None) -> None:
        """A folder that was emptied or replaced under us holds another run: readers would never see our versions."""
        try:
            found = self.ledger.epoch(self.epoch)
        except NotFoundError:
            raise self._taken_over(
                "a store without this writer's claim: it was emptied or replaced", manifest
            ) from None
        except (FormatError, IntegrityError) as error:  # damaged, but nobody else's: claims are create-only
            log.warning("this writer's claim of epoch %d cannot be read: %s", self.epoch, error)
            return
        if found != self.claim:
            raise self._taken_over(f"writer {found.writer!r} of run {found.run!r}", manifest)

    def _claim_after(self, epoch: int, manifest: Manifest | None) -> Epoch | None:
        try:
            return self.ledger.epoch(epoch + 1)
        except NotFoundError:
            return None
        except (FormatError, IntegrityError) as error:  # somebody's all the same
            raise self._taken_over(f"an unreadable claim of epoch {epoch + 1}", manifest) from error

    def _taken_over(self, other: str, manifest: Manifest | None) -> ConflictError:
        fate = f" (version {manifest.version} of this writer may be left out of the run)" if manifest else ""
        return ConflictError(
            f"run {self.run}: a second publisher{fate}",
            expected=f"writer {self.writer!r} of epoch {self.epoch} alone",
            got=other,
            remedy="stop this trainer or that one, or give each a run folder of its own",
        )


def _object_refs(version: int, epoch: int, objects: Sequence[bytes | ObjectRef]) -> Iterator[ObjectRef]:
    for data in objects:
        yield data if isinstance(data, ObjectRef) else object_ref(version, epoch, data)


def object_ref(version: int, epoch: int, data: bytes) -> ObjectRef:
    """Where a version's delta object belongs, and what it is."""
    sha256 = hashlib.sha256(data).hexdigest()
    return ObjectRef(delta_key(version, epoch, sha256), len(data), sha256)


def adapter_ref(version: int, epoch: int, data: bytes) -> ObjectRef:
    """The same for a version's adapter."""
    sha256 = hashlib.sha256(data).hexdigest()
    return ObjectRef(adapter_key(version, epoch, sha256), len(data), sha256)


def _parse_or_none(data: bytes) -> Manifest | None:
    try:
        return Manifest.from_bytes(data)
    except FormatError:
        return None
