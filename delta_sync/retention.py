"""Which old objects of a run nobody needs any more, and deleting them in an order that never misleads a reader."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from delta_sync.errors import ChainError, FormatError, IntegrityError, NotFoundError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.manifest_reader import expect
from delta_sync.store.base import Store
from delta_sync.store.keys import (
    ADAPTERS,
    ANCHORS,
    DELTAS,
    FOLDS,
    MANIFESTS,
    anchor_key,
    parse_anchor_key,
    parse_attached_key,
    parse_fold_key,
    parse_manifest_key,
)

DEFAULT_GRACE = 3600.0  # seconds that what is no longer needed stays for who is reading it
READER_SECONDS = 24 * 3600.0  # a replica that was not heard of for longer holds nothing back
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Trim:
    """``keys``, in the order in which they are to be deleted, and their ``bytes``.

    ``first_kept`` is the oldest version that stays, None where all do; ``held_by`` says what for. ``orphans`` counts
    the keys that belong to no version, or to an anchor that was given up.
    """

    keys: tuple[str, ...]
    bytes: int
    first_kept: int | None
    held_by: str
    orphans: int


def find_trim(ledger: Ledger, keep: int, grace: float = DEFAULT_GRACE, *, now: float | None = None) -> Trim:
    """What may go if the newest ``keep`` anchors, one at least, stay with all versions from the oldest of them on.

    Stays too: what a replica that was heard of within a day needs on from the version that it acknowledged, and what
    became superfluous less than ``grace`` seconds ago by an anchor's ``created_at`` and this machine's clock (``now``).
    Costs five listings, a read for each version that stays, and a look at each orphan. StoreError; FormatError or
    IntegrityError where damage hides what is needed.
    """
    now = time.time() if now is None else now
    folders = (DELTAS, ADAPTERS, ANCHORS, FOLDS, MANIFESTS)
    listed = {info.key: info.size for folder in folders for info in ledger.store.list(folder)}
    head = ledger.head()
    if head is None:
        return Trim((), 0, None, "there is no version", 0)
    kept = _walk(ledger, head, keep, now - grace, listed)
    floor, held_by = _floor(ledger, kept, now, grace)
    if floor is None:
        held_by = f"anchors there: {len(kept.anchored)}; the newest {keep} stay, older ones for {grace:g} s more"
    old = _older(listed, floor or 0)
    orphans = [*_orphaned_deltas(listed, kept, now - grace), *_orphaned_anchors(listed, kept, now - grace)]
    orphans = [key for key in orphans if _version(key) >= (floor or 0) and _written(ledger.store, key) <= now - grace]
    keys = (*old, *orphans)
    return Trim(keys, sum(listed[key] for key in keys), floor, held_by, len(orphans))


def delete(store: Store, keys: Iterable[str]) -> None:
    """Delete objects in the order given; StoreError, after which it may be called again."""
    for key in keys:
        store.delete(key)


@dataclass
class _Kept:
    """The newest versions, down to the oldest anchor that has to stay (``complete``), else to the chain's end."""

    versions: dict[int, Manifest] = field(default_factory=dict)
    anchored: dict[int, float] = field(default_factory=dict)  # version -> when its anchor was complete
    complete: bool = False


def _walk(ledger: Ledger, head: Manifest, keep: int, before: float, listed: Mapping[str, int]) -> _Kept:
    kept = _Kept()
    manifest: Manifest | None = head
    while manifest is not None:
        kept.versions[manifest.version] = manifest
        created = _anchor_time(ledger, manifest, listed)
        if created is not None:
            kept.anchored[manifest.version] = created
            if len(kept.anchored) >= keep and created <= before:
                kept.complete = True
                break
        try:
            manifest = ledger.parent(manifest)
        except ChainError:  # what is older is gone already
            break
    return kept


def _anchor_time(ledger: Ledger, manifest: Manifest, listed: Mapping[str, int]) -> float | None:
    """When a version's anchor was complete; None without one, and for one whose record or files are damaged or gone."""
    key = anchor_key(manifest.version, manifest.epoch)
    try:
        record = ledger.anchor(manifest) if key in listed else None
        for ref in record.objects if record else ():
            expect(f"size of {ref.key}", ref.size, listed.get(ref.key))
    except (FormatError, IntegrityError) as error:
        log.warning("retention does not count anchor %s: %s", key, error)
        return None
    return None if record is None else record.created_at


def _floor(ledger: Ledger, kept: _Kept, now: float, grace: float) -> tuple[int | None, str]:
    """The oldest version to keep, None where all stay, and what for."""
    if not kept.complete:
        return None, ""
    floor = min(kept.versions)
    held_by = f"the anchor of version {floor}"
    for replica, ack in ledger.acknowledgements().items():
        of_late = abs(now - ack.time) <= max(grace, READER_SECONDS)  # one from far ahead is as little to be believed
        if ack.version is not None and ack.version < floor and of_late:
            floor, held_by = ack.version, f"replica {replica}, which serves version {ack.version}"
    return floor, held_by


def _older(listed: Iterable[str], floor: int) -> list[str]:
    """All of the versions below ``floor``: manifests, oldest first, so that no chain gets a hole; records; data."""
    old = sorted((key for key in listed if 0 < _version(key) < floor), key=lambda key: (_version(key), key))
    manifests = [key for key in old if key.startswith(MANIFESTS)]
    records = [key for key in old if parse_anchor_key(key) or parse_fold_key(key)]
    first = {*manifests, *records}
    return [*manifests, *records, *(key for key in old if key not in first)]


def _orphaned_deltas(listed: Iterable[str], kept: _Kept, before: float) -> list[str]:
    """Objects of a version that another writer or try made in the end, so long ago that no commit of it goes on."""
    written = {(name.version, name.epoch) for key in listed if (name := parse_manifest_key(key))}
    found = []
    for key in listed:
        place = parse_attached_key(key) if key.startswith((DELTAS, ADAPTERS)) else None
        version = kept.versions.get(place[0]) if place else None
        if version is None or version.created_at > before:
            continue
        ours = place == (version.version, version.epoch)
        if (ours and all(ref.key != key for ref in version.objects)) or (not ours and place not in written):
            found.append(key)
    return found


def _orphaned_anchors(listed: Mapping[str, int], kept: _Kept, before: float) -> list[str]:
    """Files of an anchor that was given up: a newer one is complete, and a trainer never goes back to an older one."""
    newest = max((version for version, created in kept.anchored.items() if created <= before), default=0)
    places = {key: place for key in listed if key.startswith(ANCHORS) and (place := parse_attached_key(key))}
    return [key for key, place in places.items() if place[0] < newest and anchor_key(*place) not in listed]


def _written(store: Store, key: str) -> float:
    """When an object was written, as far as the store says: a mirror may be writing what was made long ago."""
    try:
        return store.written_at(key) or 0.0
    except NotFoundError:
        return 0.0


def _version(key: str) -> int:
    """The version that an object belongs to, 0 for what is none of a version's."""
    name, place = parse_manifest_key(key), parse_attached_key(key)
    return name.version if name else place[0] if place else 0
