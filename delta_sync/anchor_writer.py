"""Attach complete weights to a version."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from delta_sync.digest import state_digest
from delta_sync.errors import FormatError, IntegrityError, NotFoundError, StoreError
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.manifest import AnchorRecord, Manifest, ObjectRef, TensorState
from delta_sync.signing import sign
from delta_sync.store.base import Store
from delta_sync.store.keys import anchor_folder, anchor_key, check_key

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey


def attach_anchor(
    store: Store,
    manifest: Manifest,
    files: Mapping[str, Path | bytes],
    tensors: Mapping[str, TensorState],
    signing_key: SigningKey | None = None,
) -> AnchorRecord:
    """Store ``files`` as the version's anchor, its record last; IntegrityError if ``tensors`` are not the version's.

    The same files again heal those that were damaged. Other files replace the anchor: its record goes first, so that
    a reader sees the old one, none, or the new one; one that is reading the old one gets an IntegrityError and starts
    again.
    """
    if (got := state_digest(tensors)) != manifest.state_digest:
        raise IntegrityError(f"anchor of version {manifest.version}", expected=manifest.state_digest, got=got)
    folder, key = anchor_folder(manifest.version, manifest.epoch), anchor_key(manifest.version, manifest.epoch)
    if key in (folder + name for name in files) or not any(name.endswith(".safetensors") for name in files):
        raise FormatError("files of an anchor", expected="safetensors, and no anchor.json", got=sorted(files))
    refs = tuple(_describe(folder + name, files[name]) for name in sorted(files))
    record = AnchorRecord(
        manifest.version, manifest.epoch, manifest.sha256, manifest.state_digest, refs, dict(tensors), time.time()
    )
    record = sign(record, signing_key)  # FormatError before anything is written
    existing = _existing(store, key)
    if existing is not None and sign(replace(record, created_at=existing.created_at), signing_key) == existing:
        record = existing
    else:
        store.delete(key)
    keep = {key, *(ref.key for ref in refs)}
    for info in list(store.list(folder)):  # leftovers of another sharding would be loaded along with ours
        if info.key not in keep:
            store.delete(info.key)
    try:
        for name, content in files.items():
            _put(store, folder + name, content)
        store.put(key, record.to_bytes())
    except StoreError:
        if record is not existing:  # files without a record are of no use, and the store may be full
            _remove(store, [ref.key for ref in refs])
        raise
    return record


def _remove(store: Store, keys: Sequence[str]) -> None:
    for key in keys:
        with contextlib.suppress(StoreError):
            store.delete(key)


def _existing(store: Store, key: str) -> AnchorRecord | None:
    """The anchor that is there; one that cannot be read is as good as none, as it is about to be replaced."""
    try:
        return AnchorRecord.from_bytes(store.get(key, max_bytes=DEFAULT_LIMITS.manifest_bytes))
    except (NotFoundError, FormatError, IntegrityError):
        return None


def _describe(key: str, content: Path | bytes) -> ObjectRef:
    check_key(key)
    if isinstance(content, bytes):
        return ObjectRef(key, len(content), hashlib.sha256(content).hexdigest())
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return ObjectRef(key, file.tell(), digest.hexdigest())


def _put(store: Store, key: str, content: Path | bytes) -> None:
    if isinstance(content, bytes):
        store.put(key, content)
    else:
        store.put_file(key, content)
