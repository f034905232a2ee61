"""The small JSON objects beside the manifests: the HEAD hint and the epoch claims."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from delta_sync.store.keys import MAX_EPOCH, MAX_VERSION, epoch_key, manifest_key
from delta_sync.strict_json import FORMAT_VERSION, Fields, dumps, loads

RECORD_BYTES = 64 * 1024


@dataclass(frozen=True)
class Head:
    """``HEAD.json``: a hint to the newest version, replaced after each commit; nobody may rely on it."""

    run: str
    epoch: int
    writer: str
    version: int
    manifest: str  # sha256 hex of the manifest's bytes

    @property
    def key(self) -> str:
        """Where the hinted manifest lies."""
        return manifest_key(self.version, self.epoch, self.writer)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return dumps(asdict(self) | {"format_version": FORMAT_VERSION})

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
        )


@dataclass(frozen=True)
class Epoch:
    """``epochs/{epoch:06d}.json``: one writer's claim, created once and never replaced."""

    run: str
    epoch: int
    writer: str
    created_at: float  # unix seconds, information only

    @property
    def key(self) -> str:
        """Where the claim lies."""
        return epoch_key(self.epoch)

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        return dumps(asdict(self) | {"format_version": FORMAT_VERSION})

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
        )
