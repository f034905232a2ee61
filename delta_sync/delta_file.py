"""One delta object: a safetensors file that describes itself in its header. docs/FORMAT.md is its specification."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from delta_sync.checks import check
from delta_sync.codec import Codec, Group, codec_named
from delta_sync.container import read_container, write_container
from delta_sync.delta_header import DeltaHeader, Entry, TableGroup, from_metadata, to_metadata
from delta_sync.errors import FormatError
from delta_sync.folding import disjoint
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.gaps import slices
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.tensor_delta import TensorDelta

__all__ = ["DEFAULT_CODEC", "DeltaHeader", "Unpacked", "UnpackedGroup", "decode_delta", "encode_delta", "unpack_delta"]

_GROUP_ELEMENTS = 2**24  # changed elements at which a writer starts another group: bounds what is coded at once


def encode_delta(header: DeltaHeader, deltas: Sequence[TensorDelta]) -> bytes:
    """One object holding ``deltas``, each tensor at most once in an encoding; FormatError if they are malformed."""
    codec = codec_named(header.codec)
    for delta in deltas:
        check(delta)
    _check_disjoint(deltas)
    parts = list(_grouped(deltas))
    table = [_table_group(part) for part in parts]
    metadata = to_metadata(header, table)
    from_metadata(metadata, DEFAULT_LIMITS)  # never write what a reader would refuse
    streams: dict[str, bytes] = {}
    for index, (group, part) in enumerate(zip(table, parts, strict=True)):
        positions = np.concatenate([delta.positions for delta in part])
        values = np.concatenate([delta.values for delta in part])
        coded = codec.encode(group.coded(str(index)), positions, values)
        streams |= {f"{index}.{name}": data for name, data in coded.items()}
    return write_container(metadata, streams)


def decode_delta(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> tuple[DeltaHeader, list[TensorDelta]]:
    """The header and deltas of one object; FormatError, and nothing else, if the bytes are not one."""
    unpacked = unpack_delta(data, limits)
    return unpacked.header, unpacked.deltas()


@dataclass(frozen=True)
class UnpackedGroup:
    """Tensors coded together: what their streams hold, entropy coding undone, not yet positions and values."""

    codec: Codec
    coded: Group
    entries: tuple[Entry, ...]
    contents: Mapping[str, bytes]

    def deltas(self) -> Iterator[TensorDelta]:
        """One delta a tensor; FormatError."""
        positions, values = self.codec.join(self.coded, self.contents)
        for entry, part in zip(self.entries, slices(self.coded.counts), strict=True):
            yield TensorDelta(
                entry.name, self.coded.dtype, entry.shape, self.coded.encoding, positions[part], values[part]
            )


@dataclass(frozen=True)
class Unpacked:
    """One delta object half way to its deltas; ``data`` are its bytes."""

    data: bytes | memoryview
    header: DeltaHeader
    groups: Sequence[UnpackedGroup]

    def deltas(self) -> list[TensorDelta]:
        """All deltas; FormatError."""
        deltas = [delta for group in self.groups for delta in group.deltas()]
        _check_disjoint(deltas)
        return deltas


def unpack_delta(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> Unpacked:
    """One object with its frames undone, which is most of the work and none of the memory; FormatError."""
    return unpack_frames(open_delta(data, limits), limits)


@dataclass(frozen=True)
class Opened:
    """One delta object whose header is read and nothing else; ``data`` are its bytes, ``streams`` parts of them."""

    data: bytes | memoryview
    header: DeltaHeader
    table: Sequence[TableGroup]
    streams: Mapping[str, memoryview]


def open_delta(data: bytes | memoryview, limits: Limits = DEFAULT_LIMITS) -> Opened:
    """An object's header, checked, of whatever codec; FormatError."""
    metadata, streams = read_container(data, limits)
    return Opened(data, *from_metadata(metadata, limits), streams)


def unpack_frames(opened: Opened, limits: Limits = DEFAULT_LIMITS) -> Unpacked:
    """The rest of ``unpack_delta``."""
    header, table, streams = opened.header, opened.table, opened.streams
    codec = codec_named(header.codec)
    coded = [group.coded(f"group {i}") for i, group in enumerate(table)]
    expected = [f"{i}.{name}" for i, group in enumerate(table) for name in codec.stream_names(coded[i])]
    if list(streams) != expected:
        raise FormatError("delta object streams", expected=str(expected)[:200], got=str(list(streams))[:200])
    groups = []
    for i, group in enumerate(coded):
        own = {name: streams[f"{i}.{name}"] for name in codec.stream_names(group)}
        groups.append(UnpackedGroup(codec, group, table[i].entries, codec.unpack(group, own, limits)))
    return Unpacked(opened.data, header, groups)


def _grouped(deltas: Sequence[TensorDelta]) -> Iterator[list[TensorDelta]]:
    """Deltas by encoding and element type, in groups of bounded size (a tensor is never split)."""
    kinds: dict[tuple[str, str], list[TensorDelta]] = {}
    for delta in deltas:
        kinds.setdefault((delta.encoding, delta.dtype.name), []).append(delta)
    for members in kinds.values():
        group: list[TensorDelta] = []
        changed = 0
        for delta in members:
            if group and changed + delta.changed > _GROUP_ELEMENTS:
                yield group
                group, changed = [], 0
            group.append(delta)
            changed += delta.changed
        yield group


def _table_group(deltas: Sequence[TensorDelta]) -> TableGroup:
    entries = tuple(Entry(delta.name, delta.shape, delta.changed) for delta in deltas)
    return TableGroup(deltas[0].encoding, deltas[0].dtype, entries)


def _check_disjoint(deltas: Sequence[TensorDelta]) -> None:
    """A tensor's ULP and raw entries must not name the same position, else their order would matter."""
    seen: dict[str, TensorDelta] = {}
    for delta in deltas:
        other = seen.setdefault(delta.name, delta)
        if other is not delta and not disjoint(other, delta):
            raise FormatError(f"tensor {delta.name!r}", expected="each position in one encoding", got="one in both")
