"""Attach complete weights to a version, file by file: other versions may be committed in between."""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Collection, Mapping
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

Content = Path | bytes


def attach_anchor(
    store: Store,
    manifest: Manifest,
    files: Mapping[str, Content],
    tensors: Mapping[str, TensorState],
    signing_key: SigningKey | None = None,
) -> AnchorRecord:
    """Store ``files`` as the version's anchor in one go; raises what AnchorUpload raises, and leaves nothing then."""
    upload = AnchorUpload(store, manifest, files, tensors, signing_key)
    try:
        for name, content in files.items():
            upload.put(name, content)
        return upload.finish()
    except StoreError:
        upload.abandon()
        raise


class AnchorUpload:
    """The files of one version's anchor on their way: each ``put`` once, in any order, then ``finish``.

    The record is written last, so that an upload that ends early leaves no anchor. The same files again heal those
    that were damaged. Other files replace an anchor: its record goes first, so that a reader sees the old one, none,
    or the new one; one that is reading the old one gets an IntegrityError and starts again.
    IntegrityError if ``tensors``, every tensor's state, are not the version's; FormatError for impossible names.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        names: Collection[str],
        tensors: Mapping[str, TensorState],
        signing_key: SigningKey | None = None,
    ) -> None:
        if (got := state_digest(tensors)) != manifest.state_digest:
            raise IntegrityError(f"anchor of version {manifest.version}", expected=manifest.state_digest, got=got)
        if "anchor.json" in names or not any(name.endswith(".safetensors") for name in names):
            raise FormatError("files of an anchor", expected="safetensors, and no anchor.json", got=sorted(names))
        self._store, self.manifest, self._tensors = store, manifest, dict(tensors)
        self._signing_key = signing_key
        self._folder = anchor_folder(manifest.version, manifest.epoch)
        self._key = anchor_key(manifest.version, manifest.epoch)
        self._missing = {check_key(self._folder + name) for name in names}
        self._refs: dict[str, ObjectRef] = {}
        self._existing = self._read_existing()
        if self._existing is None or not self._same_but_for_files(self._existing):
            self._replace()
        for info in list(store.list(self._folder)):  # leftovers of another sharding would be loaded along with ours
            if info.key not in {self._key, *self._missing}:
                store.delete(info.key)

    def put(self, name: str, content: Content) -> None:
        """Write one file; after a StoreError it may be put again."""
        ref = _describe(self._folder + name, content)
        if self._existing is not None and ref not in self._existing.objects:
            self._replace()
        if isinstance(content, bytes):
            self._store.put(ref.key, content)
        else:
            self._store.put_file(ref.key, content)
        self._refs[ref.key] = ref
        self._missing.discard(ref.key)

    def finish(self) -> AnchorRecord:
        """Write the record, which makes the anchor visible; FormatError while files are missing."""
        if self._missing:
            raise FormatError(
                f"anchor of version {self.manifest.version}", expected="all files", got=sorted(self._refs)
            )
        record = self._existing or self._record()
        self._store.put(self._key, record.to_bytes())
        return record

    def abandon(self) -> None:
        """Delete what was put, as far as the store lets it: files without a record are of no use."""
        if self._existing is not None:  # the same files as a whole anchor's
            return
        for key in [*self._refs, *self._missing]:
            with contextlib.suppress(StoreError):
                self._store.delete(key)

    def _replace(self) -> None:
        self._store.delete(self._key)
        self._existing = None

    def _same_but_for_files(self, record: AnchorRecord) -> bool:
        ours = self._record()
        signed = sign(record, self._signing_key) == record
        same = signed and (record.manifest, record.state_digest, record.tensors) == (
            ours.manifest,
            ours.state_digest,
            ours.tensors,
        )
        return same and {ref.key for ref in record.objects} == self._missing

    def _record(self) -> AnchorRecord:
        version, refs = self.manifest, tuple(self._refs[key] for key in sorted(self._refs))
        record = AnchorRecord(
            version.version, version.epoch, version.sha256, version.state_digest, refs, self._tensors, time.time()
        )
        return sign(record, self._signing_key)

    def _read_existing(self) -> AnchorRecord | None:
        """The anchor that is there; one that cannot be read is as good as none, as it is about to be replaced."""
        try:
            return AnchorRecord.from_bytes(self._store.get(self._key, max_bytes=DEFAULT_LIMITS.manifest_bytes))
        except (NotFoundError, FormatError, IntegrityError):
            return None


def _describe(key: str, content: Content) -> ObjectRef:
    if isinstance(content, bytes):
        return ObjectRef(key, len(content), hashlib.sha256(content).hexdigest())
    with content.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256")
        return ObjectRef(key, file.tell(), digest.hexdigest())
