"""What a reader asks a run: what is newest, how do I get there, give me this object.

The truth is the set of manifests, each naming its parent by hash; HEAD is only a hint. The rules:

1. A version exists once its manifest does. Manifests are created once and never replaced.
2. The newest version is the highest version of the highest epoch that has one. An epoch is claimed, create-only,
   before its writer reads what it will continue, so whatever an older epoch's writer adds after that is no part of
   the run. An epoch whose first manifest names a parent that the store does not have is passed over in favour of
   the next lower one; ChainError if that would lose versions.
3. A version's ancestors are found by the hash that it names as its parent: a missing one is a gap, another one in
   its place a fork (both ChainError), the right key with other bytes an IntegrityError.
4. Nothing that a reader is told moves it to an older (epoch, version) of the same run.
"""

from __future__ import annotations

import hashlib
import logging
import math
import random
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from delta_sync.ack import ACK_BYTES, Ack
from delta_sync.aside import aside
from delta_sync.errors import ChainError, FormatError, IntegrityError, NotFoundError
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.manifest import AnchorRecord, FoldRecord, Manifest, ObjectRef
from delta_sync.manifest_reader import ManifestReader, expect
from delta_sync.newest import newest_listed, next_of, walk_forward
from delta_sync.plan import Plan, Position
from delta_sync.planner import build_plan
from delta_sync.records import RECORD_BYTES, Epoch, Head, read_epoch
from delta_sync.signing import PublicKeys
from delta_sync.store.base import Store
from delta_sync.store.keys import (
    ANCHORS,
    EPOCHS,
    FOLDS,
    HEAD,
    MANIFESTS,
    REPLICAS,
    anchor_key,
    epoch_key,
    fold_key,
    manifest_prefix,
    parse_anchor_key,
    parse_epoch_key,
    parse_fold_key,
)
from delta_sync.strict_json import clip

if TYPE_CHECKING:
    from delta_sync.store.cache import ObjectCache

log = logging.getLogger(__name__)


@dataclass(frozen=True, order=True)
class AnchorRef:
    """An anchor's place: the version and epoch that it belongs to."""

    version: int
    epoch: int


@dataclass(frozen=True, order=True)
class FoldRef:
    """A fold's place: the version and epoch that it leads to, and the version it begins at."""

    version: int
    epoch: int
    base_version: int


class Ledger:
    """Reads one run's manifests, anchors, objects and acknowledgements; may be shared by threads.

    Every method raises StoreError where the store fails. Nothing read is believed before it is checked, and a failed
    call changes nothing: the next one starts from what was last known to be good. With pinned ``keys`` what none of
    them signed is refused (SignatureError, a FormatError). Acknowledgements are in ``acks`` if they have a store of
    their own, so that ``store`` need not be writable. Objects are read by way of ``cache``, if there is one.
    """

    def __init__(
        self,
        store: Store,
        limits: Limits = DEFAULT_LIMITS,
        *,
        relist_seconds: float = 1.0,
        keys: PublicKeys | None = None,
        acks: Store | None = None,
        cache: ObjectCache | None = None,
    ) -> None:
        self.store, self.limits, self.keys, self.acks, self._cache = store, limits, keys, acks or store, cache
        self._relist_seconds = relist_seconds
        self._left_out: dict[str, str] = {}  # acknowledgements that were warned of
        self._listed: tuple[float, Head | None] = (-math.inf, None)  # when, and what HEAD said then
        self._seen: Manifest | None = None
        self._reader = ManifestReader(store, limits, keys)

    def unread(self) -> Ledger:
        """A ledger of the same run that has seen nothing yet, and so lists before it says what is newest."""
        return Ledger(
            self.store, self.limits, relist_seconds=self._relist_seconds, keys=self.keys, acks=self.acks,
            cache=self._cache,
        )  # fmt: skip

    # --- the newest version

    def head(self) -> Manifest | None:
        """The newest version, or None before the first; ChainError, FormatError or IntegrityError if it is damaged.

        After the first call this costs three small reads at once while nothing changes: HEAD, the next version's key,
        and the next epoch's. While an epoch is claimed but has no version yet, manifests are listed when HEAD changes,
        else every ``relist_seconds``.
        """
        return self._look(to_the_end=True)

    def _look(self, *, to_the_end: bool) -> Manifest | None:
        seen = self._seen
        following = None if seen is None else aside(partial(next_of, self._reader, seen))
        claimed = None if seen is None else aside(partial(self._exists, epoch_key(seen.epoch + 1)))
        hint = self._hint()
        if seen is not None and (hint is None or hint.run != seen.run) and not self._exists(seen.key):
            seen = None  # the store was emptied; what is there now, if anything, is another run
        found: Manifest | None = None
        if seen is not None and not self._newer_epoch(seen, hint, claimed):
            found = walk_forward(self._reader, seen, hint, following, to_the_end=to_the_end)
        elif seen is not None and self._just_listed(hint):
            found = seen
        if found is None:
            self._listed = (time.monotonic(), hint)
            found = newest_listed(self._reader)
        if seen is not None and found is not None and found.run != seen.run:
            raise _two_runs(seen, found)
        if seen is not None and (found is None or _order(found) < _order(seen)):
            found = seen
        if found is not None and found is not seen and hint is not None and hint.key == found.key:
            expect(f"sha256 of {found.key}", hint.manifest, found.sha256)
        self._seen = found
        return found

    def wait_newer(
        self,
        position: Position | None,
        deadline: float,
        stop: threading.Event | None = None,
        *,
        poll_seconds: float = 0.1,
    ) -> Manifest | None:
        """A version ahead of ``position``, the newest but for what came just now; None at ``deadline`` or on ``stop``.

        ``deadline`` is a time.monotonic. Looks every ``poll_seconds``, give or take a third so that replicas spread
        out. Raises what head() raises.
        """
        stop = stop or threading.Event()
        while True:
            head = self._look(to_the_end=False)
            if head is not None and self.is_ahead(head, position):
                return head
            left = deadline - time.monotonic()
            if left <= 0 or stop.wait(min(left, poll_seconds * random.uniform(0.67, 1.33))):
                return None

    def is_ahead(self, head: Manifest, position: Position | None) -> bool:
        """Whether a replica at ``position`` should move to ``head``; never to an older one of the same run."""
        if position is None:
            return True
        if position.manifest == head.sha256:
            return False
        if head.version > position.version:
            return True
        mine = self._reader.find(position.version, position.manifest)
        return mine is None or mine.run != head.run or _order(head) > _order(mine)

    def plan(
        self,
        position: Position | None,
        live_state: str | None,
        *,
        prefer_anchor: bool = False,
        use_folds: bool = True,
        target: Manifest | None = None,
        newest: Manifest | None = None,
        without: Collection[AnchorRef] = (),
    ) -> Plan | None:
        """How a replica gets to the newest version; None if it is there, or if there is no version yet.

        ``position``: what it serves, None if unknown; ``live_state``: state digest of the bits in its memory, None if
        unknown; ``prefer_anchor``: trust neither; ``use_folds``: take a fold of several deltas where it is smaller;
        ``target``: this version rather than the newest, wherever it is; ``newest``: that, if it was just looked for;
        ``without``: anchors that are not to be taken, because they turned out to be damaged.
        Costs one read for each version on the way, and a listing where there are several.
        ChainError if no start exists; FormatError or IntegrityError if only damage stands in the way.
        """
        head = target or newest or self.head()
        if head is None or not (prefer_anchor or target or self.is_ahead(head, position)):
            return None
        known = (None, None) if prefer_anchor else (position, live_state)
        return build_plan(self, head, *known, use_folds=use_folds, without=without)

    # --- versions

    def highest_listed(self) -> Position | None:
        """The listed manifest with the highest version, read or not: where a new epoch may go on after damage."""
        names = self._reader.names(MANIFESTS)
        top = max(names, key=lambda name: (name.version, name.epoch), default=None)
        return None if top is None else Position(top.version, self._reader.hash(top))

    def newest_below(self, version: int) -> Manifest | None:
        """The newest version before ``version``, whether or not that can be read; raises what head() raises."""
        return newest_listed(self._reader, below=version)

    def manifest(self, version: int, sha256: str | None = None) -> Manifest:
        """One version's manifest, by hash, or the one on the newest version's chain; ChainError if there is none."""
        if sha256 is not None:
            found = self._reader.find(version, sha256)
        elif (head := self.head()) is None or head.version < version:
            found = None
        elif head.version == version:
            found = head
        else:
            names = self._reader.names(manifest_prefix(version))
            line = [self._reader.read(names[0])] if len(names) == 1 else self.ancestors(head, version)
            found = next((last for last in line[-1:] if last.version == version), None)  # the run may begin above it
        if found is None:
            raise ChainError(
                f"version {version}",
                expected=sha256 or "a manifest",
                got="none in the store",
                remedy="`delta-sync ledger` lists the versions that there are",
            )
        return found

    def parent(self, manifest: Manifest) -> Manifest | None:
        """The version before, None at the run's start; ChainError at a gap or fork, IntegrityError if damaged."""
        if manifest.parent is None:
            return None
        version, name = manifest.version - 1, f"parent {manifest.parent[:16]} of version {manifest.version}"
        found = self._reader.find(version, manifest.parent, near=manifest)
        if found is None:
            others = [name.key for name in self._reader.names(manifest_prefix(version))]
            got = f"other manifests: {others}" if others else "none"
            raise ChainError(name, expected=f"its manifest at version {version}", got=got, remedy="attach an anchor")
        if found.run != manifest.run:
            raise ChainError(name, expected=f"run {manifest.run}", got=f"run {found.run}", remedy="attach an anchor")
        return found

    def ancestors(self, manifest: Manifest, down_to: int) -> list[Manifest]:
        """The versions before ``manifest``, newest first, down to version ``down_to``; raises what parent() raises."""
        found: list[Manifest] = []
        while manifest.version > down_to and (parent := self.parent(manifest)) is not None:
            found.append(manifest := parent)
        return found

    # --- anchors, objects, acknowledgements, epochs

    def anchors(self) -> list[AnchorRef]:
        """Every complete anchor, oldest first; costs one listing."""
        found = (parse_anchor_key(info.key) for info in self.store.list(ANCHORS))
        return sorted(AnchorRef(*place) for place in found if place)

    def anchor(self, manifest: Manifest) -> AnchorRecord | None:
        """The anchor attached to a version, or None; FormatError, or IntegrityError if it is another version's."""
        key = anchor_key(manifest.version, manifest.epoch)
        try:
            data = self.store.get(key, max_bytes=self.limits.manifest_bytes)
        except NotFoundError:
            return None
        record = AnchorRecord.from_bytes(data, limits=self.limits)
        if self.keys is not None:
            self.keys.check(AnchorRecord, data, key)
        for what in ("version", "epoch", "state_digest"):
            expect(f"{key}: {what}", getattr(manifest, what), getattr(record, what))
        expect(f"{key}: manifest", manifest.sha256, record.manifest)
        return record

    def folds(self) -> list[FoldRef]:
        """Every complete fold, oldest version first; costs one listing."""
        found = (parse_fold_key(info.key) for info in self.store.list(FOLDS))
        return sorted(FoldRef(*place) for place in found if place)

    def fold(self, manifest: Manifest, base_version: int) -> FoldRecord | None:
        """The fold that leads to a version from an older one, or None; FormatError, or IntegrityError if it lies."""
        key = fold_key(manifest.version, manifest.epoch, base_version)
        try:
            data = self.store.get(key, max_bytes=self.limits.manifest_bytes)
        except NotFoundError:
            return None
        record = FoldRecord.from_bytes(data, limits=self.limits)
        if self.keys is not None:
            self.keys.check(FoldRecord, data, key)
        for what in ("run", "version", "epoch", "state_digest"):
            expect(f"{key}: {what}", getattr(manifest, what), getattr(record, what))
        expect(f"{key}: manifest", manifest.sha256, record.manifest)
        expect(f"{key}: base_version", base_version, record.base_version)
        return record

    def read_object(self, ref: ObjectRef) -> bytes:
        """One object's bytes, checked: IntegrityError if size or sha256 differ, NotFoundError if it is missing."""
        if self._cache is not None:
            return self._cache.read(ref, self.store)
        data = self.store.get(ref.key, max_bytes=ref.size)
        expect(f"size of object {ref.key}", ref.size, len(data))
        expect(f"sha256 of object {ref.key}", ref.sha256, hashlib.sha256(data).hexdigest())
        return data

    def acknowledge(self, ack: Ack) -> None:
        """Write what a replica says about itself, replacing what it said before."""
        self.acks.put(ack.key, ack.to_bytes())

    def acknowledgements(self) -> dict[str, Ack]:
        """What each replica last said, by replica; unreadable ones are left out with a warning in the log, once."""
        found = {}
        for info in self.acks.list(REPLICAS):
            try:
                ack = Ack.from_bytes(self.acks.get(info.key, max_bytes=ACK_BYTES))
                expect(f"key of {info.key}", ack.key, info.key)
                found[ack.replica] = ack
            except (FormatError, IntegrityError, NotFoundError) as error:
                if self._left_out.get(info.key) != str(error):
                    self._left_out[info.key] = str(error)
                    log.warning("left out acknowledgement %s: %s", clip(info.key), error)
        return found

    def epochs(self) -> list[int]:
        """Every claimed epoch, oldest first; costs one listing."""
        return sorted(epoch for info in self.store.list(EPOCHS) if (epoch := parse_epoch_key(info.key)))

    def epoch(self, epoch: int) -> Epoch:
        """Who claimed an epoch, signed or not; NotFoundError if nobody did; FormatError, IntegrityError."""
        return read_epoch(self.store, epoch)

    # --- the watch

    def _hint(self) -> Head | None:
        """HEAD, or None where it is missing or damaged: a hint that cannot be read, or is not signed, is no hint."""
        try:
            data = self.store.get(HEAD, max_bytes=RECORD_BYTES)
            if self.keys is not None:
                self.keys.check(Head, data, HEAD)
            return Head.from_bytes(data)
        except (NotFoundError, FormatError, IntegrityError):
            return None

    def _newer_epoch(self, seen: Manifest, hint: Head | None, claimed: Future[bool] | None) -> bool:
        if hint is not None and hint.epoch > seen.epoch:
            return True
        return self._exists(epoch_key(seen.epoch + 1)) if claimed is None else claimed.result()

    def _just_listed(self, hint: Head | None) -> bool:
        when, then = self._listed
        return hint == then and time.monotonic() - when < self._relist_seconds

    def _exists(self, key: str) -> bool:
        try:
            self.store.info(key)
        except NotFoundError:
            return False
        return True


def _order(manifest: Manifest) -> tuple[int, int]:
    return manifest.epoch, manifest.version


def _two_runs(seen: Manifest, found: Manifest) -> ChainError:
    return ChainError(
        found.key, expected=f"a version of run {seen.run}, whose {seen.key} is still there", got=f"run {found.run}",
        remedy="give each run a folder of its own, and remove what was copied into this one",
    )  # fmt: skip
