"""What a key may look like, and the keys of one run."""

from __future__ import annotations

import re
from dataclasses import dataclass

from delta_sync.errors import FormatError
from delta_sync.strict_json import clip

KEY_BYTES = 1024
SEGMENT_BYTES = 255  # what local file systems allow for one name
TEMPORARY = ".delta-sync-tmp-"  # names that start so belong to writes in progress; no key may use them

HEAD = "HEAD.json"
MANIFESTS = "manifests/"
ANCHORS = "anchors/"
DELTAS = "deltas/"
FOLDS = "folds/"
ADAPTERS = "adapters/"
EPOCHS = "epochs/"
REPLICAS = "replicas/"
MAX_VERSION = 10**12 - 1
MAX_EPOCH = 10**6 - 1

_FORBIDDEN = re.compile(r"[\x00-\x1f\x7f\\\ud800-\udfff]")
_MANIFEST = re.compile(r"manifests/([0-9]{12})-([0-9]{6})-([A-Za-z0-9][A-Za-z0-9._-]{0,63})\.json")
_ANCHOR = re.compile(r"anchors/([0-9]{12})-([0-9]{6})/anchor\.json")
_ATTACHED = re.compile(r"(?:deltas|adapters|anchors|folds)/([0-9]{12})-([0-9]{6})[-/].+")
_FOLD = re.compile(r"folds/([0-9]{12})-([0-9]{6})/([0-9]{12})\.json")
_EPOCH = re.compile(r"epochs/([0-9]{6})\.json")


def check_key(key: str) -> str:
    """Return ``key`` if it names an object inside the store; FormatError otherwise."""
    if not isinstance(key, str) or not key or _FORBIDDEN.search(key) or len(key.encode()) > KEY_BYTES:
        _refuse(key, f"1 to {KEY_BYTES} bytes without control characters or backslashes")
    for segment in key.split("/"):
        if segment in ("", ".", "..") or len(segment.encode()) > SEGMENT_BYTES or segment.startswith(TEMPORARY):
            _refuse(key, f"segments of 1 to {SEGMENT_BYTES} bytes, none of them '.', '..' or '{TEMPORARY}*'")
    return key


def is_key(key: str) -> bool:
    """Whether the contract allows this key: others, who write what they like, may have left objects under it."""
    try:
        return bool(check_key(key))
    except FormatError:
        return False


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` if some key could start with it; FormatError otherwise."""
    check_key(prefix + "x")
    return prefix


def _refuse(key: object, expected: str) -> None:
    raise FormatError(f"store key {clip(key)!r}", expected=expected, got="a key that could leave the store")


@dataclass(frozen=True, order=True)
class ManifestName:
    """What a manifest's key says about it: epoch, version and writer; ordered so that the newest is greatest."""

    epoch: int
    version: int
    writer: str

    @property
    def key(self) -> str:
        """The key that this name was read from."""
        return manifest_key(self.version, self.epoch, self.writer)


def manifest_key(version: int, epoch: int, writer: str) -> str:
    """Where a version's manifest lies."""
    return f"{MANIFESTS}{version:012d}-{epoch:06d}-{writer}.json"


def manifest_prefix(version: int) -> str:
    """What the keys of all manifests of one version start with."""
    return f"{MANIFESTS}{version:012d}-"


def delta_key(version: int, epoch: int, sha256: str) -> str:
    """Where one object of a delta lies; it carries its content's hash, so writing it twice changes nothing."""
    return f"{DELTAS}{version:012d}-{epoch:06d}-{sha256[:16]}.safetensors"


def adapter_key(version: int, epoch: int, sha256: str) -> str:
    """Where a version's adapter lies, in the same way."""
    return f"{ADAPTERS}{version:012d}-{epoch:06d}-{sha256[:16]}.safetensors"


def anchor_folder(version: int, epoch: int) -> str:
    """The folder of one anchor, with the slash."""
    return f"{ANCHORS}{version:012d}-{epoch:06d}/"


def anchor_key(version: int, epoch: int) -> str:
    """Where an anchor's record lies; it is written last."""
    return anchor_folder(version, epoch) + "anchor.json"


def fold_folder(version: int, epoch: int) -> str:
    """The folder of the folds that lead to one version, with the slash."""
    return f"{FOLDS}{version:012d}-{epoch:06d}/"


def fold_key(version: int, epoch: int, base: int) -> str:
    """Where the record of the fold from version ``base`` lies; it is written last."""
    return f"{fold_folder(version, epoch)}{base:012d}.json"


def fold_object_key(version: int, epoch: int, base: int, sha256: str) -> str:
    """Where one object of a fold lies."""
    return f"{fold_folder(version, epoch)}{base:012d}-{sha256[:16]}.safetensors"


def epoch_key(epoch: int) -> str:
    """Where the claim of one epoch lies."""
    return f"{EPOCHS}{epoch:06d}.json"


def replica_key(replica: str) -> str:
    """Where one replica's acknowledgement lies."""
    return f"{REPLICAS}{replica}.json"


def parse_manifest_key(key: str) -> ManifestName | None:
    """The name behind a manifest's key, or None for any other key."""
    found = _MANIFEST.fullmatch(key)
    return ManifestName(int(found[2]), int(found[1]), found[3]) if found else None


def parse_anchor_key(key: str) -> tuple[int, int] | None:
    """(version, epoch) of an anchor record's key, or None for any other key."""
    found = _ANCHOR.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def parse_fold_key(key: str) -> tuple[int, int, int] | None:
    """(version, epoch, base version) of a fold record's key, or None for any other key."""
    found = _FOLD.fullmatch(key)
    return (int(found[1]), int(found[2]), int(found[3])) if found else None


def parse_attached_key(key: str) -> tuple[int, int] | None:
    """(version, epoch) that an object of a delta, an anchor or a fold belongs to, or None for any other key."""
    found = _ATTACHED.fullmatch(key)
    return (int(found[1]), int(found[2])) if found else None


def parse_epoch_key(key: str) -> int | None:
    """The epoch of a claim's key, or None for any other key."""
    found = _EPOCH.fullmatch(key)
    return int(found[1]) if found else None
