"""Delta objects coded against the bits they change: written from old and new bits, read with the old ones at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from delta_sync.bitmap import Bits
from delta_sync.container import read_container, write_container
from delta_sync.context_codec import CONTEXT_CODEC, STREAMS, Layer, decode_group, encode_group, read_table
from delta_sync.context_model import tiles
from delta_sync.context_scan import Found
from delta_sync.delta import flat
from delta_sync.delta_file import decode_delta, encode_delta
from delta_sync.delta_header import DeltaHeader, Entry, TableGroup, from_metadata, to_metadata
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.tensor_delta import TensorDelta

_GROUP_ELEMENTS = 2**29  # elements at which a writer starts another group: bounds what is coded at once
Base = Callable[[str, DType, tuple[int, ...]], Bits]


@dataclass(frozen=True)
class Change:
    """One tensor before and after: carrier bits of ``shape``, or flat."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    old: Bits
    new: Bits


def encode_against(
    header: DeltaHeader, changes: Sequence[Change], grid: tuple[int, int] = (1, 1)
) -> tuple[DeltaHeader, bytes, list[TensorDelta]]:
    """One object that turns each tensor's old bits into its new ones, its header, the same as ULP deltas; FormatError.

    ``header.codec`` becomes the codec used: this one, or the gap codec where that is smaller. ``grid`` is the number
    of parts, 1 to 256, that tensors are cut into along all axes but the last and along the last: a reader that holds
    whole parts can decode those.
    """
    table: list[TableGroup] = []
    streams: dict[str, bytes] = {}
    deltas: list[TensorDelta] = []
    for index, group in enumerate(_grouped(changes)):
        layers = [_layer(change, grid) for change in group]
        coded, found = encode_group(group[0].dtype, layers, grid)
        part = [_tensor_delta(change, found[k]) for k, change in enumerate(group)]
        entries = tuple(Entry(delta.name, delta.shape, delta.changed) for delta in part)
        table.append(TableGroup("ulp", group[0].dtype, entries))
        streams |= {f"{index}.{name}": data for name, data in coded.items()}
        deltas += part
    ours, fallback = (replace(header, codec=codec) for codec in (CONTEXT_CODEC, DEFAULT_CODEC))
    metadata = to_metadata(ours, table)
    from_metadata(metadata, DEFAULT_LIMITS)  # never write what a reader would refuse
    data, plain = write_container(metadata, streams), encode_delta(fallback, deltas)
    return (ours, data, deltas) if len(data) < len(plain) else (fallback, plain, deltas)


Decoded = tuple[DeltaHeader, list[TensorDelta]]


def decode_if_alone(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Decoded | bytes:
    """An object decoded if that needs no base, else its bytes, for ``decode_against``; FormatError."""
    header, _ = from_metadata(read_container(data, limits)[0], limits)
    return data if header.codec == CONTEXT_CODEC else decode_delta(data, limits)


def decode_against(
    data: bytes | memoryview, base: Base, limits: Limits = DEFAULT_LIMITS
) -> tuple[DeltaHeader, list[TensorDelta]]:
    """The header and ULP deltas of one object of any codec; FormatError, and nothing else, if the bytes are not one.

    ``base(name, dtype, shape)`` gives a tensor's bits at the object's base version: with other bits the result is wrong
    (the digests tell) or refused. It is called only for context-coded objects, and its errors are passed on.
    """
    metadata, streams = read_container(data, limits)
    header, table = from_metadata(metadata, limits)
    if header.codec != CONTEXT_CODEC:
        return decode_delta(data, limits)
    expected = [f"{i}.{name}" for i in range(len(table)) for name in STREAMS]
    if list(streams) != expected:
        raise FormatError("delta object streams", expected=str(expected)[:200], got=str(list(streams))[:200])
    deltas = [d for i, group in enumerate(table) for d in _decode_group(i, group, streams, base, limits)]
    return header, deltas


def _decode_group(
    index: int, group: TableGroup, streams: Mapping[str, memoryview], base: Base, limits: Limits
) -> Iterator[TensorDelta]:
    coded = group.coded(f"group {index}")
    if group.encoding != "ulp":
        raise FormatError(coded.label, expected="encoding 'ulp' in a context-coded object", got=group.encoding)
    own = {name: streams[f"{index}.{name}"] for name in STREAMS}
    table = read_table(own, coded.label)
    layers = []
    for e in group.entries:
        bits = flat(e.name, group.dtype, e.shape, base(e.name, group.dtype, e.shape))
        layers.append(Layer(bits, tuple(tiles(e.shape, table.grid))))
    for entry, (positions, steps) in zip(group.entries, decode_group(coded, table, layers, own, limits), strict=True):
        if table.grid[1] > 1:  # tiles side by side: back to row-major order
            order = np.argsort(positions, kind="stable")
            positions, steps = positions[order], steps[order]
        yield TensorDelta(entry.name, group.dtype, entry.shape, "ulp", positions, steps)


def _grouped(changes: Sequence[Change]) -> Iterator[list[Change]]:
    """Changes by element type, in groups of bounded size (a tensor is never split)."""
    kinds: dict[str, list[Change]] = {}
    for change in changes:
        kinds.setdefault(change.dtype.name, []).append(change)
    for members in kinds.values():
        group: list[Change] = []
        elements = 0
        for change in members:
            if group and elements + change.old.size > _GROUP_ELEMENTS:
                yield group
                group, elements = [], 0
            group.append(change)
            elements += change.old.size
        yield group


def _layer(change: Change, grid: tuple[int, int]) -> Layer:
    old, new = (flat(change.name, change.dtype, change.shape, bits) for bits in (change.old, change.new))
    return Layer(old, tuple(tiles(change.shape, grid)), new)


def _tensor_delta(change: Change, found: Found) -> TensorDelta:
    positions, _, _, steps = found
    if positions.size and (np.diff(positions) <= 0).any():
        order = np.argsort(positions, kind="stable")
        positions, steps = positions[order], steps[order]
    return TensorDelta(change.name, change.dtype, change.shape, "ulp", positions, steps)
