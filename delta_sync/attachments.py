"""What hangs on a run's versions besides their own objects: a record, and the objects that must be there before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from delta_sync.digest import state_digest
from delta_sync.ledger import Ledger
from delta_sync.limits import Limits
from delta_sync.manifest import AnchorRecord, FoldRecord, ObjectRef
from delta_sync.manifest_reader import expect
from delta_sync.store.base import ObjectInfo, Store
from delta_sync.store.keys import ANCHORS, FOLDS, anchor_folder, parse_anchor_key, parse_fold_key


@dataclass(frozen=True)
class Attachment:
    """A record's key and bytes, the version that it hangs on, and the objects that it names.

    ``folder``: where nothing but these objects may lie, as all of it is loaded together; empty if there is none.
    """

    key: str
    data: bytes
    version: int
    manifest: str
    objects: tuple[ObjectRef, ...]
    folder: str = ""


@dataclass(frozen=True)
class Kind:
    """One sort of attachment: where its records lie, (version, epoch) of a record's key, and how to read one.

    ``read`` raises FormatError, SignatureError where the ledger pins keys, IntegrityError, or ChainError where the
    store does not have that version.
    """

    prefix: str
    place: Callable[[str], tuple[int, int] | None]
    read: Callable[[Ledger, str, bytes], Attachment]


def _anchor(ledger: Ledger, key: str, data: bytes) -> Attachment:
    record = AnchorRecord.from_bytes(data, limits=ledger.limits)
    if ledger.keys is not None:
        ledger.keys.check(AnchorRecord, data, key)
    expect(f"version and epoch in {key}", parse_anchor_key(key), (record.version, record.epoch))
    manifest = ledger.manifest(record.version, record.manifest)
    expect(f"state digest in {key}", manifest.state_digest, record.state_digest)
    expect(f"state digest of the tensors in {key}", manifest.state_digest, state_digest(record.tensors))
    folder = anchor_folder(record.version, record.epoch)
    return Attachment(key, data, record.version, record.manifest, record.objects, folder)


def _fold(ledger: Ledger, key: str, data: bytes) -> Attachment:
    record = FoldRecord.from_bytes(data, limits=ledger.limits)
    if ledger.keys is not None:
        ledger.keys.check(FoldRecord, data, key)
    named = (record.version, record.epoch, record.base_version)
    expect(f"version, epoch and base version in {key}", parse_fold_key(key), named)
    manifest = ledger.manifest(record.version, record.manifest)
    expect(f"state digest in {key}", manifest.state_digest, record.state_digest)
    return Attachment(key, data, record.version, record.manifest, record.objects)


def _fold_place(key: str) -> tuple[int, int] | None:
    place = parse_fold_key(key)
    return place and place[:2]


ANCHOR = Kind(ANCHORS, parse_anchor_key, _anchor)
KINDS = (ANCHOR, Kind(FOLDS, _fold_place, _fold))


def list_records(store: Store) -> Iterator[tuple[Kind, tuple[int, int], ObjectInfo]]:
    """Every record with its kind and its (version, epoch), those of the newest versions first."""
    for kind in KINDS:
        found = ((kind.place(info.key), info) for info in store.list(kind.prefix))
        for place, info in sorted(((place, info) for place, info in found if place), key=lambda f: f[0], reverse=True):
            yield kind, place, info


def read_twice(store: Store, key: str, limits: Limits) -> bytes:
    """An object that nothing vouches for by hash; IntegrityError unless two reads agree, NotFoundError."""
    first = store.get(key, max_bytes=limits.manifest_bytes)
    expect(f"a second read of {key}", len(first), len(second := store.get(key, max_bytes=limits.manifest_bytes)))
    expect(f"the bytes of a second read of {key}", True, first == second)
    return first
