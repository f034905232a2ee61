"""One run copied to another store and kept up there, so that replicas may follow either.

The copy is a whole run at every moment, whenever this process ends: claims of epochs come first, a version's objects
before its manifest, that before HEAD, an attachment's objects before its record. Everything is checked against the
hash that its manifest or record gives before it is written, so damage is never passed on. What is there already stays
there; a destination with anything of another run, or of a trainer of its own, is refused.

Versions are copied oldest first: of an empty destination those since the newest anchor, so that it is of use soon, then
that anchor, then what is older. Between any two objects newer versions go first, so no anchor delays one.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from delta_sync.attachments import ANCHOR, Kind, list_records, read_twice
from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, NotFoundError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.manifest import Manifest
from delta_sync.manifest_reader import ManifestReader, expect
from delta_sync.mirror_target import MirrorTarget
from delta_sync.records import RECORD_BYTES, Epoch, Head
from delta_sync.signing import PublicKeys
from delta_sync.store.base import Store
from delta_sync.store.cache import ObjectCache
from delta_sync.store.keys import HEAD, MANIFESTS, MAX_VERSION, ManifestName, anchor_key, epoch_key

DAMAGE = (ChainError, FormatError, IntegrityError, NotFoundError)
RECHECK_SECONDS = 60.0  # between two looks for what is missing below the newest version, or was attached anew
ASIDE_SECONDS = 600.0
LIST_POLLS = 5  # looks for a newer version between two for new attachments, which are listed
HINT_SECONDS = 1.0  # between two writes of HEAD while many versions are copied
_NEVER = -float("inf")


def _nothing() -> None:
    """What is done between two objects by default."""


class Stopped(Exception):
    """The mirror was told to stop."""


class _Version(NamedTuple):
    name: ManifestName
    sha256: str


class Mirror:
    """Copies one run from ``source`` to ``target``; not for several threads.

    ``from_anchor``: of an empty target, leave out what is older than the newest anchor. ``check``: read what the
    target has too, and write again what is damaged there. ``keys``: what none of them signed is damage.
    ``damage`` is what the last ``copy`` met and left out, by object; ``newest`` and ``reached`` are the newest
    versions of both.
    """

    def __init__(
        self,
        source: Store,
        target: Store,
        cache: ObjectCache,
        *,
        from_anchor: bool = False,
        check: bool = False,
        poll: float = 1.0,
        stop: threading.Event | None = None,
        keys: PublicKeys | None = None,
    ) -> None:
        self._source, self._reader = Ledger(source, keys=keys), ManifestReader(source, DEFAULT_LIMITS, keys)
        self._target = MirrorTarget(target, source, cache, DEFAULT_LIMITS, check=check)
        self._from_anchor, self._check, self._poll = from_anchor, check, poll
        self._stop = stop or threading.Event()
        self.newest: Manifest | None = None
        self.reached: Manifest | None = None
        self.damage: dict[str, DeltaSyncError] = {}
        self._opened = False
        self._have: set[ManifestName] = set()  # the target's manifests
        self._aside: set[ManifestName] = set()  # at the source, but none of the run's; forgotten now and then
        self._aside_since = _NEVER
        self._claimed = 0  # the newest epoch whose claim was copied
        self._tried = ""  # sha256 of the newest version that was gone through
        self._hint = "", _NEVER  # sha256 of the manifest that the trainer's HEAD names there, and when HEAD was written
        self._attached: dict[str, int] = {}  # records that are there, with their sizes
        self._anchors: set[AnchorRef] | None = None  # the source's, asked for once a pass where damage is met
        self._looked = self._rechecked = self._listed = _NEVER

    @property
    def written(self) -> tuple[int, int]:
        """How many objects and bytes were written to the target."""
        return self._target.objects, self._target.bytes

    @property
    def progress(self) -> int:
        """Grows with everything that is there for good; falls before what hangs on versions is looked at again."""
        return len(self._have) + len(self._attached)

    def copy(self) -> bool:
        """Copy everything that the source has now; whether the target then is a whole copy.

        StoreError where one of the two stores fails, ConflictError if the target is another's, Stopped; ChainError,
        FormatError or IntegrityError where the source's newest version is damaged. Call again after any but Conflict.
        """
        due = bool(self.damage) or time.monotonic() - self._rechecked > RECHECK_SECONDS
        if self.damage:
            self.damage, self._tried = {}, ""
        self._looked, self._anchors = _NEVER, None
        if not self._copy_newest():
            return False
        if due:
            self._attached.clear()
            self._have &= self._target.names()  # retention may have been at work there
        if due or time.monotonic() - self._listed >= LIST_POLLS * self._poll:
            self._copy_attachments()
            self._listed = time.monotonic()
        if due:
            self._copy_older()
            self._copy_attachments()
            self._write_head(0.0)
            self._rechecked = time.monotonic()
        return not self.damage

    # --- versions

    def _copy_newest(self) -> bool:
        """Follow the source's newest version, at most every ``poll`` seconds; False before its first one."""
        if self._stop.is_set():
            raise Stopped
        if time.monotonic() - self._looked < self._poll:
            return True
        self.newest = head = self._source.head()
        self._looked = time.monotonic()
        if head is None:
            return False
        if not self._opened:
            self._open(head)
        elif head.epoch > self._claimed:
            self._copy_claims(head)
        if head.sha256 != self._tried:
            anchored = set() if self._have else set(self._source.anchors())
            versions, whole = self._missing(
                head, lambda m: _name(m) in self._have or _place(m) in anchored, gap=bool(self._have)
            )
            self._copy_versions(versions, whole)
            if not self.damage and _name(head) not in self._have:
                self._note(_gap(head))
            self._tried = head.sha256
        return True

    def _copy_older(self) -> None:
        """Fill in what the target lacks below its newest version: of a first copy, or what was damaged then."""
        if time.monotonic() - self._aside_since > ASIDE_SECONDS:  # a listing may have been behind
            self._aside, self._aside_since = set(), time.monotonic()
        bottom = min((name.version for name in self._have), default=0) if self._from_anchor else 0
        top = max((name.version for name in self._have), default=MAX_VERSION)  # what is above waits for an anchor
        names = {name for name in self._reader.names(MANIFESTS) if bottom <= name.version < top}
        lacking = names - self._have - self._aside
        if not lacking or self.newest is None:
            return
        lowest = min(name.version for name in lacking)
        versions, whole = self._missing(self.newest, lambda manifest: manifest.version <= lowest)
        if whole:  # the others are of a writer who was taken over
            self._aside |= lacking - {version.name for version in versions}
        self._copy_versions([v for v in versions if v.name.version < top], whole, self._copy_newest)

    def _missing(
        self, head: Manifest, is_last: Callable[[Manifest], bool], *, gap: bool = False
    ) -> tuple[list[_Version], bool]:
        """What the target lacks of ``head`` and the versions before it, oldest first; False if damage ends the walk.

        So does with ``gap`` that older versions were removed.
        """
        found: list[_Version] = []
        manifest, whole = head, True
        while True:
            if _name(manifest) not in self._have:
                found.append(_Version(_name(manifest), manifest.sha256))
            elif self.reached is None or _order(manifest) > _order(self.reached):
                self.reached = manifest
            if is_last(manifest):
                break
            try:
                parent = self._source.parent(manifest)
            except ChainError:  # older ones were removed
                whole = not gap
                break
            except DAMAGE as error:
                self._note(error)
                whole = False
                break
            if parent is None:
                break
            manifest = parent
        return found[::-1], whole

    def _copy_versions(
        self, versions: Sequence[_Version], whole: bool, between: Callable[[], object] = _nothing
    ) -> None:
        """Copy versions, oldest first; behind damage, or if not ``whole``, only from the next one with an anchor on."""
        for name, sha256 in versions:
            between()
            if self._stop.is_set():
                raise Stopped
            manifest = self._read(name, sha256)
            whole = manifest is not None and self._copy_weights(manifest, whole)
            if manifest and whole:
                self._publish(manifest)
        self._write_head(0.0)

    def _read(self, name: ManifestName, sha256: str) -> Manifest | None:
        """A manifest of the source; None, with the damage noted, if it is not to be had any more."""
        try:
            if (found := self._reader.at(name.key, sha256)) is None:
                raise NotFoundError(f"object {name.key}", expected="a manifest", got="none, a moment later")
        except DAMAGE as error:
            self._note(error)
            return None
        return found

    def _copy_weights(self, manifest: Manifest, whole: bool) -> bool:
        """Copy a version's objects or, to lead past damage in or before them, its anchor; False if neither can be."""
        if self._target.claimed(self._claimed + 1):
            self._copy_claims(manifest)  # the source's too, or it is a trainer's who publishes there
        if whole:
            try:
                for ref in manifest.objects:
                    self._target.put_object(ref)
                return True
            except DAMAGE as error:
                self._note(error)
        if self._anchors is None:
            self._anchors = set(self._source.anchors())
        return _place(manifest) in self._anchors and self._attach(ANCHOR, anchor_key(manifest.version, manifest.epoch))

    def _publish(self, manifest: Manifest) -> None:
        self._target.put_manifest(manifest)
        self._have.add(_name(manifest))
        if self.reached is None or _order(manifest) > _order(self.reached):
            self.reached = manifest
            self._write_head(HINT_SECONDS)

    def _write_head(self, seconds: float) -> None:
        sha256, when = self._hint
        if self.reached is not None and self.reached.sha256 != sha256 and time.monotonic() - when >= seconds:
            head, theirs = self._head_of(self.reached)
            self._target.put_head(head)
            self._hint = self.reached.sha256 if theirs else "", time.monotonic()

    def _head_of(self, manifest: Manifest) -> tuple[bytes, bool]:
        """HEAD, and whether it is as the trainer wrote it, signed: only if that names this version already."""
        m = manifest
        ours = Head(m.run, m.epoch, m.writer, m.version, m.sha256)
        with contextlib.suppress(*DAMAGE):
            data = self._source.store.get(HEAD, max_bytes=RECORD_BYTES)
            if replace(Head.from_bytes(data), signature=None) == ours:
                return data, True
        return ours.to_bytes(), False

    # --- what hangs on versions

    def _copy_attachments(self) -> None:
        """Those of versions that the target has, newest first, as far as they are new or due to be compared."""
        there = {(name.version, name.epoch) for name in self._have}
        for kind, place, info in list_records(self._source.store):
            if place not in there or self._attached.get(info.key) == info.size:
                continue
            if self._attach(kind, info.key, self._copy_newest):
                self._attached[info.key] = info.size

    def _attach(self, kind: Kind, key: str, between: Callable[[], object] = _nothing) -> bool:
        """Copy a record and before it what it names; False, with the damage noted, if that is not to be had."""
        try:
            attachment = kind.read(self._source, key, read_twice(self._source.store, key, self._source.limits))
            if (new := self._target.begin(attachment)) or self._check:
                for ref in attachment.objects:
                    between()
                    self._target.put_object(ref, look=True)
            if new:
                self._target.finish(attachment)
        except DAMAGE as error:
            self._note(error)
            return False
        return True

    # --- whose run it is

    def _open(self, head: Manifest) -> None:
        """See what the target has; ConflictError if any of it is foreign."""
        names = self._target.names()
        claims = self._copy_claims(head)
        self._target.check_names(names, set(self._reader.names(MANIFESTS)), claims)
        self._have, self._opened = set() if self._check else names, True

    def _copy_claims(self, head: Manifest) -> dict[int, Epoch]:
        """Copy the claims of epochs, and return them; ConflictError if the target has one that the source has not."""
        claims: dict[int, bytes] = {}
        damaged: set[int] = set()
        for epoch in sorted({*self._source.epochs(), *self._target.epochs()}):
            key = epoch_key(epoch)
            try:
                data = read_twice(self._source.store, key, self._source.limits)
                claim = Epoch.from_bytes(data)
                if self._source.keys is not None:
                    self._source.keys.check(Epoch, data, key)
                expect(f"run and key of {key}", (head.run, key), (claim.run, claim.key))
                claims[epoch] = data
            except NotFoundError:
                pass  # the target's own: put_claims refuses it
            except DAMAGE as error:
                self._note(error)
                damaged.add(epoch)
        self._target.put_claims(claims, damaged)
        self._claimed = max(claims, default=0)
        return {epoch: Epoch.from_bytes(data) for epoch, data in claims.items()}

    def _note(self, error: DeltaSyncError) -> None:
        self.damage[error.what] = error


def _gap(head: Manifest) -> ChainError:
    return ChainError(
        f"way to version {head.version} of the source", expected="all versions since the copy's newest, or an anchor",
        got="neither", remedy="attach an anchor, and mirror more often than old versions are deleted",
    )  # fmt: skip


def _name(manifest: Manifest) -> ManifestName:
    return ManifestName(manifest.epoch, manifest.version, manifest.writer)


def _place(manifest: Manifest) -> AnchorRef:
    return AnchorRef(manifest.version, manifest.epoch)


def _order(manifest: Manifest) -> tuple[int, int]:
    return manifest.epoch, manifest.version
