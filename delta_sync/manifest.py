"""One version's description: immutable, canonical JSON, the truth about what a version is."""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Literal, cast

from delta_sync.breath import breathe
from delta_sync.dtypes import DTYPES
from delta_sync.errors import FormatError
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.signing import Signable, Signature, read_signature, record_json
from delta_sync.store.keys import MAX_EPOCH, MAX_VERSION, anchor_folder, check_key, fold_folder, manifest_key
from delta_sync.strict_json import HEX16, MAX_EXACT, Fields, clip, dumps, loads

Kind = Literal["origin", "delta", "adapter"]
PromptCache = Literal["all", "new_session", "none"]
_TRACEPARENT = re.compile(r"00-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f\ud800-\udfff]")  # would make the digests' lines ambiguous


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
class Manifest(Signable):
    """One version.

    An *origin* starts a chain: no base, no objects, ``tensors`` lists every tensor.
    A *delta* changes ``base_version`` by its ``objects``; ``tensors`` lists only the tensors it touches.
    An *adapter* leaves the weights of ``base_version`` as they are and is served over them: its one object is a whole
    LoRA adapter, ``tensors`` lists that adapter's tensors, and the digests are still those of the weights below.
    Complete weights are never part of a manifest: an AnchorRecord attaches them to a version.
    """

    RECORD = "manifest"

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
    prompt_cache: PromptCache
    created_at: float  # unix seconds, information only
    metrics: Mapping[str, float] = field(default_factory=dict)  # the training log's latest numbers, by name
    traceparent: str | None = None  # W3C trace context of the span that published this version
    extra: Mapping[str, object] = field(default_factory=dict)  # unknown keys are kept, never acted on
    signature: Signature | None = None  # over all the rest; delta_sync/signing.py

    def to_bytes(self) -> bytes:
        """Canonical JSON (sorted keys, no spaces, UTF-8); FormatError if the values are not a valid manifest."""
        return self._encoded

    @cached_property
    def _encoded(self) -> bytes:
        data = self._canonical()
        _read_manifest(data, DEFAULT_LIMITS)
        return data

    def _canonical(self) -> bytes:
        known = record_json(self, objects=_objects_json(self.objects), tensors=tensors_to_json(self.tensors))
        del known["extra"]
        for name in ("metrics", "traceparent"):
            if not known[name]:  # absent rather than empty
                del known[name]
        if overlap := sorted(_KNOWN & self.extra.keys()):
            raise FormatError("manifest: extra keys", expected="keys that the format does not define", got=overlap)
        return dumps({**self.extra, **known})

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> Manifest:
        """Parse and validate; FormatError names the field, what was expected and what was got."""
        manifest = _read_manifest(data, limits)
        if manifest._canonical() != data:
            raise FormatError(
                "manifest bytes",
                expected="canonical JSON: sorted keys, no spaces, shortest numbers",
                got="another spelling of the same values",
                remedy="write manifests with Manifest.to_bytes",
            )
        manifest.__dict__["_encoded"] = data  # what to_bytes would find again
        return manifest

    @property
    def key(self) -> str:
        """``manifests/{version:012d}-{epoch:06d}-{writer}.json``."""
        return manifest_key(self.version, self.epoch, self.writer)

    @cached_property
    def sha256(self) -> str:
        """sha256 hex of to_bytes(): this version's identity, the ``parent`` of the next."""
        return hashlib.sha256(self.to_bytes()).hexdigest()


@dataclass(frozen=True)
class AnchorRecord(Signable):
    """Complete weights attached to a version: ``anchors/{version:012d}-{epoch:06d}/anchor.json``, written last.

    The folder is an ordinary sharded Hugging Face checkpoint (config, tokenizer, index, shards);
    ``objects`` lists every file in it with size and sha256, ``manifest`` is the version's manifest sha256.
    Keys that the format does not define are ignored.
    """

    RECORD = "anchor"

    version: int
    epoch: int
    manifest: str
    state_digest: str
    objects: tuple[ObjectRef, ...]
    tensors: Mapping[str, TensorState]
    created_at: float
    signature: Signature | None = None

    def to_bytes(self) -> bytes:
        """Canonical JSON; FormatError if the values are not a valid record."""
        data = dumps(record_json(self, objects=_objects_json(self.objects), tensors=tensors_to_json(self.tensors)))
        AnchorRecord.from_bytes(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> AnchorRecord:
        """Parse and validate; FormatError names the field, what was expected and what was got."""
        fields = Fields(loads(data, "anchor record", max_bytes=limits.manifest_bytes), "anchor record")
        fields.check_version()
        record = cls(
            version=fields.integer("version", 1, MAX_VERSION),
            epoch=fields.integer("epoch", 1, MAX_EPOCH),
            manifest=fields.sha256("manifest"),
            state_digest=fields.sha256("state_digest"),
            objects=_objects(fields, limits),
            tensors=_tensors(fields, limits),
            created_at=fields.number("created_at"),
            signature=read_signature(fields),
        )
        folder = anchor_folder(record.version, record.epoch)
        for ref in record.objects:
            if not ref.key.startswith(folder):
                fields.fail("objects", f"keys inside {folder}", ref.key)
        return record


@dataclass(frozen=True)
class FoldRecord(Signable):
    """The deltas from one version to a later one as one: ``folds/{version:012d}-{epoch:06d}/{base:012d}.json``.

    ``objects`` turn the bits of ``base_version``, whose manifest has sha256 ``base_manifest``, into those of
    ``version``, whose manifest has sha256 ``manifest``; ``tensors`` is the state after it of those they touch.
    Keys that the format does not define are ignored.
    """

    RECORD = "fold"

    run: str
    version: int
    epoch: int
    manifest: str
    base_version: int
    base_manifest: str
    state_digest: str
    objects: tuple[ObjectRef, ...]
    tensors: Mapping[str, TensorState]
    codec: str
    created_at: float
    signature: Signature | None = None

    def to_bytes(self) -> bytes:
        """Canonical JSON; FormatError if the values are not a valid record."""
        data = dumps(record_json(self, objects=_objects_json(self.objects), tensors=tensors_to_json(self.tensors)))
        FoldRecord.from_bytes(data)
        return data

    @classmethod
    def from_bytes(cls, data: bytes, *, limits: Limits = DEFAULT_LIMITS) -> FoldRecord:
        """Parse and validate; FormatError names the field, what was expected and what was got."""
        fields = Fields(loads(data, "fold record", max_bytes=limits.manifest_bytes), "fold record")
        fields.check_version()
        record = cls(
            run=fields.name("run"),
            version=fields.integer("version", 1, MAX_VERSION),
            epoch=fields.integer("epoch", 1, MAX_EPOCH),
            manifest=fields.sha256("manifest"),
            base_version=fields.integer("base_version", 1, MAX_VERSION),
            base_manifest=fields.sha256("base_manifest"),
            state_digest=fields.sha256("state_digest"),
            objects=_objects(fields, limits),
            tensors=_tensors(fields, limits),
            codec=fields.name("codec"),
            created_at=fields.number("created_at"),
            signature=read_signature(fields),
        )
        if record.base_version >= record.version:
            fields.fail("base_version", f"a version before {record.version}", record.base_version)
        folder = fold_folder(record.version, record.epoch)
        for ref in record.objects:
            if not ref.key.startswith(folder):
                fields.fail("objects", f"keys inside {folder}", ref.key)
        return record


def tensors_to_json(tensors: Mapping[str, TensorState]) -> dict[str, object]:
    """Tensor states as JSON values; the digest is 16 hexadecimal digits because JSON numbers are not 64 bits wide."""
    return {
        name: {"dtype": state.dtype, "shape": list(state.shape), "digest": f"{state.digest:016x}"}
        for name, state in tensors.items()
    }


def _objects_json(objects: tuple[ObjectRef, ...]) -> list[dict[str, object]]:
    return [asdict(ref) for ref in objects]


def tensors_from_json(value: object, what: str, *, limits: Limits = DEFAULT_LIMITS) -> dict[str, TensorState]:
    """The inverse of tensors_to_json; FormatError."""
    return _tensors(Fields({"tensors": value}, what), limits)


_KNOWN = frozenset(Manifest.__dataclass_fields__.keys() - {"extra"} | {"format_version"})


def _read_manifest(data: bytes, limits: Limits) -> Manifest:
    fields = Fields(loads(data, "manifest", max_bytes=limits.manifest_bytes), "manifest")
    fields.check_version()
    manifest = Manifest(
        run=fields.name("run"),
        epoch=fields.integer("epoch", 1, MAX_EPOCH),
        writer=fields.name("writer"),
        version=fields.integer("version", 1, MAX_VERSION),
        kind=cast(Kind, fields.choice("kind", ("origin", "delta", "adapter"))),
        base_version=fields.optional("base_version", lambda name: fields.integer(name, 1, MAX_VERSION)),
        parent=fields.optional("parent", fields.sha256),
        steps=_steps(fields),
        objects=_objects(fields, limits),
        tensors=_tensors(fields, limits),
        state_digest=fields.sha256("state_digest"),
        model_fingerprint=fields.sha256("model_fingerprint"),
        changed_elements=fields.integer("changed_elements", 0, limits.elements),
        total_elements=fields.integer("total_elements", 0, limits.elements),
        codec=fields.optional("codec", fields.name),
        prompt_cache=cast(PromptCache, fields.choice("prompt_cache", ("all", "new_session", "none"))),
        created_at=fields.number("created_at"),
        metrics=fields.numbers("metrics"),
        traceparent=_traceparent(fields),
        extra={key: value for key, value in fields.value.items() if key not in _KNOWN},
        signature=read_signature(fields),
    )
    _check_kind(fields, manifest)
    return manifest


def _check_kind(fields: Fields, manifest: Manifest) -> None:
    """What an origin and a delta each must and must not have."""
    if (manifest.parent is None) != (manifest.version == 1):
        fields.fail("parent", "null for version 1 and only there", f"{manifest.parent} at version {manifest.version}")
    if manifest.kind == "origin":
        if manifest.base_version is not None:
            fields.fail("base_version", "null, as an origin has no base", manifest.base_version)
        if manifest.objects:
            fields.fail("objects", "none, as an origin carries no delta", f"{len(manifest.objects)} objects")
    elif manifest.base_version != manifest.version - 1 or manifest.version == 1:
        fields.fail(
            "base_version",
            f"the version before {manifest.version}, and only an origin is version 1",
            manifest.base_version,
        )
    if manifest.kind == "adapter" and (len(manifest.objects) != 1 or not manifest.tensors or manifest.codec):
        got = f"{len(manifest.objects)} objects, {len(manifest.tensors)} tensors, codec {manifest.codec}"
        fields.fail("objects", "one, an adapter's, with its tensors and no codec", got)
    if manifest.changed_elements > manifest.total_elements:
        fields.fail(
            "changed_elements", f"at most total_elements = {manifest.total_elements}", manifest.changed_elements
        )


def _traceparent(fields: Fields) -> str | None:
    if "traceparent" not in fields.value:
        return None
    return fields.text("traceparent", _TRACEPARENT, "a W3C traceparent of version 00 with ids that are not zero")


def _steps(fields: Fields) -> tuple[int, int]:
    steps = fields.array("steps", 2)
    first, last = steps if len(steps) == 2 else (None, None)
    if type(first) is not int or type(last) is not int or not 0 <= first <= last <= MAX_EXACT:
        fields.fail("steps", f"[first, last] with 0 <= first <= last <= {MAX_EXACT}", steps)
    return first, last


def _objects(fields: Fields, limits: Limits) -> tuple[ObjectRef, ...]:
    values = fields.array("objects", limits.objects)
    refs = tuple(_object(Fields(value, f"{fields.what}: objects[{i}]"), limits) for i, value in enumerate(values))
    if len({ref.key for ref in refs}) != len(refs):
        fields.fail("objects", "each key once", "a key twice")
    return refs


def _object(fields: Fields, limits: Limits) -> ObjectRef:
    key = fields.get("key")
    if type(key) is not str:
        fields.fail("key", "a store key", key)
    return ObjectRef(check_key(key), fields.integer("size", 0, limits.object_bytes), fields.sha256("sha256"))


def _tensors(fields: Fields, limits: Limits) -> dict[str, TensorState]:
    found = {}
    for name, value in fields.object("tensors", limits.tensors).items():
        breathe()
        if not name or UNPRINTABLE.search(name) or len(name.encode()) > limits.name_bytes:
            fields.fail("tensors", f"names of 1 to {limits.name_bytes} bytes without control characters", name)
        found[name] = _tensor(Fields(value, f"{fields.what}: field 'tensors' of {clip(name)!r}"), limits)
    return found


def _tensor(fields: Fields, limits: Limits) -> TensorState:
    dtype = fields.choice("dtype", tuple(DTYPES))
    shape = fields.array("shape", limits.rank)
    sizes = tuple(size for size in shape if type(size) is int and 0 <= size <= limits.elements)
    if len(sizes) != len(shape) or math.prod(sizes) > limits.elements:
        fields.fail("shape", f"at most {limits.rank} sizes whose product is at most {limits.elements}", shape)
    return TensorState(dtype, sizes, int(fields.text("digest", HEX16, "16 lower-case hexadecimal digits"), 16))
