"""Manifests by key and by hash: read, checked and remembered."""

from __future__ import annotations

import copy
import hashlib
import threading
from collections import OrderedDict

from delta_sync.errors import FormatError, IntegrityError, NotFoundError
from delta_sync.limits import Limits
from delta_sync.manifest import Manifest
from delta_sync.signing import PublicKeys
from delta_sync.store.base import Store
from delta_sync.store.keys import ManifestName, manifest_key, manifest_prefix, parse_manifest_key

CACHED_MANIFESTS = 256
CACHED_REFUSALS = 64


class ManifestReader:
    """Reads manifests of one store; the newest few hundred are kept, as they never change. Safe to share by threads.

    With pinned ``keys`` a manifest that none of them signed is a SignatureError, as if it were damaged.
    """

    def __init__(self, store: Store, limits: Limits, keys: PublicKeys | None = None) -> None:
        self.store, self.limits, self.keys = store, limits, keys
        self._cache: OrderedDict[str, Manifest] = OrderedDict()
        self._refused: OrderedDict[str, FormatError] = OrderedDict()  # damaged bytes are not parsed at every look
        self._lock = threading.Lock()

    def names(self, prefix: str) -> list[ManifestName]:
        """The manifests under a prefix, oldest epoch and version first; other objects are none of ours."""
        found = (parse_manifest_key(info.key) for info in self.store.list(prefix))
        return sorted(name for name in found if name is not None)

    def find(self, version: int, sha256: str, near: Manifest | None = None) -> Manifest | None:
        """The manifest with these bytes, or None; ``near`` is a version next to it, likely by the same writer."""
        if cached := self._cached(sha256):
            return cached
        if near is not None and (found := self.at(manifest_key(version, near.epoch, near.writer), sha256)):
            return found
        for name in self.names(manifest_prefix(version)):
            if self.hash(name) == sha256:
                return self.read(name)
        return None

    def at(self, key: str, sha256: str | None = None) -> Manifest | None:
        """The manifest under a key, None if there is none; FormatError, or IntegrityError if its hash is another."""
        if sha256 and (cached := self._cached(sha256)):
            return cached
        try:
            data = self.store.get(key, max_bytes=self.limits.manifest_bytes)
        except NotFoundError:
            return None
        found = hashlib.sha256(data).hexdigest()
        if sha256 is not None:
            expect(f"sha256 of {key}", sha256, found)
        manifest = self._parse(key, data, found)
        expect("key of a manifest", manifest.key, key)
        self._keep(manifest)
        return manifest

    def read(self, name: ManifestName) -> Manifest:
        """The manifest behind a listed name; NotFoundError if it went away since."""
        manifest = self.at(name.key)
        if manifest is None:
            raise NotFoundError(f"object {name.key}", expected="a manifest, as just listed", got="none")
        return manifest

    def hash(self, name: ManifestName) -> str:
        """sha256 hex of a listed manifest's bytes, whatever they are."""
        return hashlib.sha256(self.store.get(name.key, max_bytes=self.limits.manifest_bytes)).hexdigest()

    def _parse(self, key: str, data: bytes, sha256: str) -> Manifest:
        with self._lock:
            if error := self._refused.get(sha256):
                raise copy.copy(error)
        try:
            manifest = Manifest.from_bytes(data, limits=self.limits)
            if self.keys is not None:
                self.keys.check(Manifest, data, key)
            return manifest
        except FormatError as error:
            with self._lock:
                self._refused[sha256] = copy.copy(error)
                if len(self._refused) > CACHED_REFUSALS:
                    self._refused.popitem(last=False)
            raise

    def _cached(self, sha256: str) -> Manifest | None:
        with self._lock:
            return self._cache.get(sha256)

    def _keep(self, manifest: Manifest) -> None:
        with self._lock:
            self._cache[manifest.sha256] = manifest
            if len(self._cache) > CACHED_MANIFESTS:
                self._cache.popitem(last=False)


def expect(what: str, expected: object, got: object) -> None:
    """IntegrityError unless both are equal."""
    if expected != got:
        remedy = "fetch it again; if it stays, a trainer on this run heals it"
        raise IntegrityError(what, expected=expected, got=got, remedy=remedy)
