"""The header of a delta object: what it says about itself, written and read with suspicion."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast, get_args

from delta_sync.breath import breathe
from delta_sync.codec import Group
from delta_sync.container import is_sizes, parse_json
from delta_sync.dtypes import DType, dtype
from delta_sync.errors import FormatError
from delta_sync.limits import Limits
from delta_sync.manifest import UNPRINTABLE
from delta_sync.tensor_delta import Encoding

FORMAT = "delta-sync"
FORMAT_VERSION = "1"
_RESERVED = {"format", "format_version", "codec", "run", "version", "base_version", "groups"}
_POSITION_BYTES = 8


@dataclass(frozen=True)
class DeltaHeader:
    """What a delta object says about itself: run id, version, the version it applies to, codec, other notes."""

    run: str
    version: int
    base_version: int
    codec: str
    extra: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """One tensor of a group: its name, shape and number of changed elements."""

    name: str
    shape: tuple[int, ...]
    count: int


@dataclass(frozen=True)
class TableGroup:
    """Tensors of one encoding and element type, as the header lists them."""

    encoding: Encoding
    dtype: DType
    entries: tuple[Entry, ...]

    def coded(self, label: str) -> Group:
        """What a codec needs to know of this group."""
        counts = tuple(entry.count for entry in self.entries)
        return Group(label, self.encoding, self.dtype, counts, tuple(math.prod(e.shape) for e in self.entries))


def to_metadata(header: DeltaHeader, groups: Sequence[TableGroup]) -> dict[str, str]:
    """The ``__metadata__`` of a delta object; FormatError if ``extra`` uses a reserved key."""
    taken = _RESERVED & set(header.extra)
    if taken:
        raise FormatError("delta header extra", expected=f"keys other than {sorted(_RESERVED)}", got=sorted(taken))
    table = [
        {"encoding": g.encoding, "dtype": g.dtype.name, "tensors": [[e.name, e.shape, e.count] for e in g.entries]}
        for g in groups
    ]
    return {
        "format": FORMAT,
        "format_version": FORMAT_VERSION,
        "codec": header.codec,
        "run": header.run,
        "version": str(header.version),
        "base_version": str(header.base_version),
        "groups": json.dumps(table, separators=(",", ":"), ensure_ascii=False),
        **header.extra,
    }


def from_metadata(metadata: Mapping[str, str], limits: Limits) -> tuple[DeltaHeader, list[TableGroup]]:
    """Parse and validate ``__metadata__``; FormatError names the field, what was expected and what was got."""
    for key, expected in (("format", FORMAT), ("format_version", FORMAT_VERSION)):
        if metadata.get(key) != expected:
            raise FormatError(f"delta header {key}", expected=repr(expected), got=repr(metadata.get(key)))
    missing = _RESERVED - set(metadata)
    if missing:
        raise FormatError("delta header", expected=f"keys {sorted(_RESERVED)}", got=f"none of {sorted(missing)}")
    version, base = _number(metadata, "version"), _number(metadata, "base_version")
    if base >= version:
        raise FormatError("delta header base_version", expected=f"less than version {version}", got=base)
    extra = {key: value for key, value in metadata.items() if key not in _RESERVED}
    header = DeltaHeader(metadata["run"], version, base, metadata["codec"], extra)
    groups = [_group(item, limits) for item in _list(parse_json(metadata["groups"], "delta header groups"), "groups")]
    _check_groups(groups, limits)
    return header, groups


def _check_groups(groups: Sequence[TableGroup], limits: Limits) -> None:
    """FormatError if the tensors together pass a limit, or one is listed twice in an encoding or differently."""
    total, decoded = 0, 0
    seen: dict[str, dict[Encoding, tuple[DType, tuple[int, ...]]]] = {}
    for group in groups:
        total += len(group.entries)
        decoded += sum(e.count for e in group.entries) * (_POSITION_BYTES + group.dtype.itemsize)
        for entry in group.entries:
            listed = seen.setdefault(entry.name, {})
            if group.encoding in listed or any(said != (group.dtype, entry.shape) for said in listed.values()):
                expected = "each tensor once in an encoding, with one dtype and shape"
                raise FormatError(f"tensor {entry.name!r}", expected=expected, got="another entry for it")
            listed[group.encoding] = (group.dtype, entry.shape)
    if total > limits.tensors:
        raise FormatError("delta header groups", expected=f"at most {limits.tensors} tensors", got=total)
    if decoded > limits.decoded_bytes:
        raise FormatError("delta object", expected=f"at most {limits.decoded_bytes} decoded bytes", got=decoded)


def _number(metadata: Mapping[str, str], key: str) -> int:
    text = metadata[key]
    if not (text.isascii() and text.isdigit()) or len(text) > 18 or str(int(text)) != text:
        raise FormatError(f"delta header {key}", expected="a plain decimal number", got=repr(text)[:50])
    return int(text)


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list):
        raise FormatError(f"delta header {what}", expected="a list", got=type(value).__name__)
    return value


def _group(value: Any, limits: Limits) -> TableGroup:
    if not isinstance(value, dict) or set(value) != {"encoding", "dtype", "tensors"}:
        raise FormatError("delta header group", expected="encoding, dtype and tensors", got=repr(value)[:100])
    if value["encoding"] not in get_args(Encoding):
        raise FormatError("encoding", expected=f"one of {get_args(Encoding)}", got=repr(value["encoding"])[:50])
    entries = tuple(_entry(row, limits) for row in _list(value["tensors"], "tensors"))
    return TableGroup(cast(Encoding, value["encoding"]), dtype(value["dtype"]), entries)


def _entry(row: Any, limits: Limits) -> Entry:
    breathe()
    if not isinstance(row, list) or len(row) != 3 or not isinstance(row[0], str):
        raise FormatError("delta header tensor", expected="[name, shape, count]", got=repr(row)[:100])
    name, shape, count = row
    _check_name(name, limits)
    if not is_sizes(shape) or len(shape) > limits.rank:
        raise FormatError(f"shape of {name!r}", expected=f"at most {limits.rank} sizes", got=repr(shape)[:100])
    elements = 1
    for size in shape:
        elements *= size
        if elements > limits.elements and 0 not in shape:
            raise FormatError(
                f"shape of {name!r}", expected=f"at most {limits.elements} elements", got=repr(shape)[:100]
            )
    if type(count) is not int or not 0 <= count <= elements:
        raise FormatError(f"count of {name!r}", expected=f"0 to {elements}", got=repr(count)[:50])
    return Entry(name, tuple(shape), count)


def _check_name(name: str, limits: Limits) -> None:
    """FormatError unless a tensor name is one that a manifest may hold."""
    size = len(name.encode("utf-8", "surrogatepass"))
    if not 1 <= size <= limits.name_bytes or UNPRINTABLE.search(name):
        expected = f"1 to {limits.name_bytes} bytes of UTF-8 without control characters"
        raise FormatError("tensor name", expected=expected, got=ascii(name)[:100])
