"""The writing side of a mirror: puts what is proven, and refuses to write beside anybody else."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Set as AbstractSet

from delta_sync.attachments import Attachment
from delta_sync.errors import ConflictError, FormatError, IntegrityError, NotFoundError, StoreError
from delta_sync.limits import Limits
from delta_sync.manifest import Manifest, ObjectRef
from delta_sync.records import RECORD_BYTES, Epoch
from delta_sync.store.base import Store
from delta_sync.store.cache import ObjectCache, pieces
from delta_sync.store.keys import EPOCHS, HEAD, MANIFESTS, ManifestName, epoch_key, parse_epoch_key, parse_manifest_key

LOOKS = 4


class MirrorTarget:
    """A store that holds nothing but one run's copy; ``objects`` and ``bytes`` count what was written to it.

    ``check``: read what is there already, and write again what is damaged. Every method raises StoreError, and
    ConflictError where something else has its place.
    """

    def __init__(self, store: Store, source: Store, cache: ObjectCache, limits: Limits, *, check: bool = False) -> None:
        self.store, self._source, self._cache, self._limits, self._check = store, source, cache, limits, check
        self.objects = self.bytes = 0
        self._written: set[ObjectRef] = set()

    def names(self) -> set[ManifestName]:
        """The manifests that are there."""
        found = (parse_manifest_key(info.key) for info in self.store.list(MANIFESTS))
        return {name for name in found if name is not None}

    def epochs(self) -> set[int]:
        """The epochs that are claimed there."""
        found = (parse_epoch_key(info.key) for info in self.store.list(EPOCHS))
        return {epoch for epoch in found if epoch is not None}

    def claimed(self, epoch: int) -> bool:
        """Whether somebody claimed an epoch there."""
        return self._get(epoch_key(epoch)) is not None

    def put_claims(self, claims: Mapping[int, bytes], damaged: AbstractSet[int]) -> None:
        """Write claims of the source's, by epoch; ConflictError if another is here, unless it is ``damaged`` there."""
        for epoch in sorted((self.epochs() | claims.keys()) - damaged):
            key, data = epoch_key(epoch), claims.get(epoch)
            if data is None or not self._create(key, data):
                raise self._taken(key, "what the source has" if data else "none, as at the source")

    def check_names(
        self, names: AbstractSet[ManifestName], known: AbstractSet[ManifestName], claims: Mapping[int, Epoch]
    ) -> None:
        """ConflictError for a manifest that neither the source has nor the writer who claimed its epoch wrote."""
        for name in sorted(names - known):
            if name.epoch not in claims or claims[name.epoch].writer != name.writer:
                raise self._taken(name.key, "versions that the source has")

    def put_object(self, ref: ObjectRef, *, look: bool = False) -> None:
        """Write one object, unless ``look`` finds it there; IntegrityError or NotFoundError if the source's is damaged.

        Keys with a hash in them are rather written twice than looked for.
        """
        if (look and ref in self._written) or ((look or self._check) and self._holds(ref)):
            return
        with self._cache.file(ref, self._source) as path:
            self.store.put_file(ref.key, path)
        self._count(ref.size)
        if look:
            self._written.add(ref)

    def put_manifest(self, manifest: Manifest) -> None:
        """Make a version visible; ConflictError if another manifest has its name."""
        data = manifest.to_bytes()
        if self._create(manifest.key, data):
            return
        if _is_manifest(self._get(manifest.key) or b"", self._limits):
            raise self._taken(manifest.key, f"sha256 {manifest.sha256[:16]}…")
        self._put(manifest.key, data)  # damaged here: nobody else's

    def put_head(self, data: bytes) -> None:
        """Write the hint to a version that is here."""
        self._put(HEAD, data)

    def begin(self, attachment: Attachment) -> bool:
        """Whether an attachment is to be written; another record of its name, which must not name these, goes first."""
        same = self._same(attachment.key, attachment.data)
        if same is False:
            self.store.delete(attachment.key)
        return not same

    def finish(self, attachment: Attachment) -> None:
        """Write an attachment's record, now that all its objects are there, and nothing else in its folder."""
        keep = {attachment.key, *(ref.key for ref in attachment.objects)}
        for info in list(self.store.list(attachment.folder)) if attachment.folder else ():
            if info.key not in keep:
                self.store.delete(info.key)
        self._put(attachment.key, attachment.data)
        self._written.difference_update(attachment.objects)

    # --- what is there

    def _create(self, key: str, data: bytes) -> bool:
        """Whether the object is ``data`` now; looks where it exists, or where the answer is unclear."""
        try:
            self.store.create(key, data)
        except (ConflictError, StoreError) as error:
            same = self._same(key, data)
            if same is None:
                raise error if isinstance(error, StoreError) else _vanished(key) from error
            return same
        self._count(len(data))
        return True

    def _same(self, key: str, data: bytes) -> bool | None:
        """Whether the object is ``data``, None without one; a read spoilt on its way must not look like another's."""
        before: bytes | None = None
        for _ in range(LOOKS):
            there = self._get(key)
            if there is None or there == data:
                return None if there is None else True
            if there == before:
                return False
            before = there
        raise StoreError(f"object {key}", expected="the same at each read", got="others", remedy="try again")

    def _put(self, key: str, data: bytes) -> None:
        self.store.put(key, data)
        self._count(len(data))

    def _count(self, size: int) -> None:
        self.objects += 1
        self.bytes += size

    def _get(self, key: str) -> bytes | None:
        try:
            return self.store.get(key, max_bytes=max(self._limits.manifest_bytes, RECORD_BYTES))
        except NotFoundError:
            return None

    def _holds(self, ref: ObjectRef) -> bool:
        """Whether the object is here, by size and, hashed piece by piece, by content."""
        digest = hashlib.sha256()
        try:
            for data in pieces(ref, self.store):
                digest.update(data)
        except (NotFoundError, IntegrityError):
            return False
        return digest.hexdigest() == ref.sha256

    def _taken(self, key: str, expected: str) -> ConflictError:
        return ConflictError(
            f"{key} in {self.store.uri}", expected=expected, got="another run's, or another trainer's",
            remedy="mirror to an empty folder, or stop who publishes there",
        )  # fmt: skip


def _is_manifest(data: bytes, limits: Limits) -> bool:
    try:
        Manifest.from_bytes(data, limits=limits)
    except FormatError:
        return False
    return True


def _vanished(key: str) -> StoreError:
    return StoreError(f"object {key}", expected="the object that is said to exist", got="none", remedy="try again")
