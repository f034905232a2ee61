"""One version's description: immutable, canonical JSON, the truth about what a version is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from delta_sync.limits import DEFAULT_LIMITS, Limits

FORMAT_VERSION = 1
Kind = Literal["origin", "delta"]


@dataclass(frozen=True)
class TensorState:
    """One tensor at one version: element type, shape and digest sum (unsigned 64-bit)."""

    dtype: str
    shape: tuple[int, ...]
    digest: int


@dataclass(frozen=True)
class ObjectRef:
    """One stored object: key relative to the run, size in bytes, sha256 in hex."""

    key: str
    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """One version.

    An *origin* starts a chain: no base, no objects, ``tensors`` lists every tensor.
    A *delta* changes ``base_version`` by its ``objects``; ``tensors`` lists only the tensors it touches.
    Complete weights are never part of a manifest: an AnchorRecord attaches them to a version.
    """

    run: str
    epoch: int
    writer: str
    version: int
    kind: Kind
    base_version: int | None
    parent: str | None  # sha256 hex of the parent manifest's bytes; an origin on a used run has a parent but no base
    steps: tuple[int, int]  # first and last optimizer step covered, inclusive
    objects: tuple[ObjectRef, ...]
    tensors: Mapping[str, TensorState]
    state_digest: str  # digest.state_digest over ALL tensors at this version
    model_fingerprint: str  # digest.model_fingerprint: names, dtypes and shapes of ALL tensors
    changed_elements: int
    total_elements: int
    codec: str | None
    prompt_cache: Literal["all", "new_session", "none"]
    created_at: float  # unix seconds, information only
    extra: Mapping[str, object] = field(default_factory=dict)  # unknown keys are kept, never acted on

    def to_bytes(self) -> bytes:
        """Canonical JSON (sorted keys, no spaces, UTF-8)."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Manifest:
        """Parse and validate; FormatError names the field, what was expected and what was got."""
        raise NotImplementedError

    @property
    def key(self) -> str:
        """``manifests/{version:012d}-{epoch:06d}-{writer}.json``."""
        raise NotImplementedError

    @property
    def sha256(self) -> str:
        """sha256 hex of to_bytes(): this version's identity, the ``parent`` of the next."""
        raise NotImplementedError


@dataclass(frozen=True)
class AnchorRecord:
    """Complete weights attached to a version: ``anchors/{version:012d}-{epoch:06d}/anchor.json``, written last.

    The folder is an ordinary sharded Hugging Face checkpoint (config, tokenizer, index, shards);
    ``objects`` lists every file in it with size and sha256, ``manifest`` is the version's manifest sha256.
    """

    version: int
    epoch: int
    manifest: str
    state_digest: str
    objects: tuple[ObjectRef, ...]
    tensors: Mapping[str, TensorState]
    created_at: float

    def to_bytes(self) -> bytes:
        """Canonical JSON."""
        raise NotImplementedError

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> AnchorRecord:
        """Parse and validate; FormatError."""
        raise NotImplementedError
