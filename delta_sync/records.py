"""The small JSON objects beside the manifests: the HEAD hint and the epoch claims."""

from __future__ import annotations

from dataclasses import dataclass

from delta_sync.errors import IntegrityError
from delta_sync.signing import PublicKeys, Signable, Signature, read_signature, record_json
from delta_sync.store.base import Store
from delta_sync.store.keys import MAX_EPOCH, MAX_VERSION, epoch_key, manifest_key
from delta_sync.strict_json import Fields, dumps, loads

RECORD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Head(Signable):
    """``HEAD.json``: a hint to the newest version, replaced after each commit; nobody may rely on it."""

    RECORD = "head"

    run: str
    epoch: int
    writer: str
    version: int
    manifest: str  # sha256 hex of the manifest's bytes
    signature: Signature | None = None

    @property
    def key(self) -> str:
        """Where the hinted manifest lies."""
        return manifest_key(self.version, self.epoch, self.writer)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return dumps(record_json(self))

    @classmethod
    def from_bytes(cls, data: bytes) -> Head:
        """Parse and validate, ignoring unknown keys; FormatError."""
        fields = Fields(loads(data, "HEAD", max_bytes=RECORD_BYTES), "HEAD")
        fields.check_version()
        return cls(
            run=fields.name("run"),
            epoch=fields.integer("epoch", 1, MAX_EPOCH),
            writer=fields.name("writer"),
            version=fields.integer("version", 1, MAX_VERSION),
            manifest=fields.sha256("manifest"),
            signature=read_signature(fields),
        )


@dataclass(frozen=True)
class Epoch(Signable):
    """``epochs/{epoch:06d}.json``: one writer's claim, created once and never replaced.

    ``reset``: an operator's, who publishes nothing: the next version is an origin with complete weights.
    """

    RECORD = "epoch"

    run: str
    epoch: int
    writer: str
    created_at: float  # unix seconds, information only
    reset: bool = False
    signature: Signature | None = None

    @property
    def key(self) -> str:
        """Where the claim lies."""
        return epoch_key(self.epoch)

    def to_bytes(self) -> bytes:
        """Canonical JSON; a trainer's claim says nothing of resets."""
        values = record_json(self)
        return dumps(values if self.reset else {name: values[name] for name in values if name != "reset"})

    @classmethod
    def from_bytes(cls, data: bytes) -> Epoch:
        """Parse and validate, ignoring unknown keys; FormatError."""
        fields = Fields(loads(data, "epoch claim", max_bytes=RECORD_BYTES), "epoch claim")
        fields.check_version()
        return cls(
            run=fields.name("run"),
            epoch=fields.integer("epoch", 1, MAX_EPOCH),
            writer=fields.name("writer"),
            created_at=fields.number("created_at"),
            reset=fields.value.get("reset", False) is True,
            signature=read_signature(fields),
        )


def read_epoch(store: Store, epoch: int, keys: PublicKeys | None = None) -> Epoch:
    """One epoch's claim; FormatError, IntegrityError if it is another epoch's, SignatureError if not by ``keys``."""
    key = epoch_key(epoch)
    data = store.get(key, max_bytes=RECORD_BYTES)
    claim = Epoch.from_bytes(data)
    if claim.key != key:
        raise IntegrityError(f"key of {key}", expected=claim.key, got=key, remedy="stop whoever else writes there")
    if keys is not None:
        keys.check(Epoch, data, key)
    return claim
