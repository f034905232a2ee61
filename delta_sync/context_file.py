"""Delta objects coded against the bits they change: written from old and new bits, read with the old ones at hand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.checks import check
from delta_sync.container import write_container
from delta_sync.context_codec import CONTEXT_CODEC, STREAMS, Layer
from delta_sync.context_decode import decode_group, read_table
from delta_sync.context_encode import Coded, Source, encode_group
from delta_sync.context_model import Tile, tiles
from delta_sync.delta import flat
from delta_sync.delta_file import Unpacked, encode_delta, open_delta, unpack_frames
from delta_sync.delta_header import DeltaHeader, Entry, TableGroup, from_metadata, to_metadata
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError, MappingError
from delta_sync.frames import compress
from delta_sync.gap_codec import DEFAULT_CODEC, PLANE_CODEC, codec_without_base
from delta_sync.gaps import encode_gaps
from delta_sync.limits import DEFAULT_LIMITS, Limits
from delta_sync.tensor_delta import TensorDelta
from delta_sync.threads import thread_count

CODECS = (DEFAULT_CODEC, PLANE_CODEC, CONTEXT_CODEC)  # each asks more of a reader than the ones before
_GROUP_ELEMENTS = 2**29  # elements at which a writer starts another group: bounds what is coded at once
_NEAR = 1024  # bytes of difference from which the headers, which differ too, decide nothing


@dataclass(frozen=True)
class PartOf:
    """A tensor of which a reader holds a part: flat ``bits`` of the whole, arbitrary beyond; ``elements`` held.

    ``holds`` says whether all of a tile is in the part.
    """

    bits: Bits
    elements: int
    holds: Callable[[Tile], bool]


Base = Callable[[str, DType, tuple[int, ...]], Bits | PartOf]


@dataclass(frozen=True)
class Change:
    """One tensor before and after: carrier bits of ``shape``, or flat."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    old: Bits
    new: Bits


@dataclass(frozen=True)
class _Tensor:
    name: str
    dtype: DType
    shape: tuple[int, ...]
    source: Source


def encode_against(
    header: DeltaHeader, changes: Sequence[Change], grid: tuple[int, int] = (1, 1)
) -> tuple[DeltaHeader, bytes, list[TensorDelta]]:
    """One object that turns each tensor's old bits into its new ones, its header, the same as ULP deltas; FormatError.

    ``header.codec`` becomes the codec used: this one, or where that is smaller one that needs no base. ``grid`` is the
    number of parts, 1 to 256, that tensors are cut into along all axes but the last and along the last: a reader that
    holds whole parts can decode those.
    """
    return _encode(header, [_from_bits(change, grid) for change in changes], grid)


def encode_deltas_against(
    header: DeltaHeader, deltas: Sequence[TensorDelta], base: Base, grid: tuple[int, int] = (1, 1)
) -> tuple[DeltaHeader, bytes]:
    """The same of changes that are known already, as ULP deltas; ``base`` gives the bits that they change, and is not
    asked for copies."""
    return _encode(header, [_from_delta(delta, base, grid) for delta in deltas], grid)[:2]


def _encode(
    header: DeltaHeader, tensors: Sequence[_Tensor], grid: tuple[int, int]
) -> tuple[DeltaHeader, bytes, list[TensorDelta]]:
    table: list[TableGroup] = []
    streams: dict[str, bytes] = {}
    deltas: list[TensorDelta] = []
    plain, ordered = 0, grid[1] == 1
    for index, group in enumerate(_grouped(tensors)):
        coded = encode_group(group[0].dtype, [tensor.source for tensor in group], grid, thread_count())
        part = [_delta(tensor, *change, ordered=ordered) for tensor, change in zip(group, coded.changes, strict=True)]
        entries = tuple(Entry(delta.name, delta.shape, delta.changed) for delta in part)
        table.append(TableGroup("ulp", group[0].dtype, entries))
        streams |= {f"{index}.{name}": data for name, data in coded.streams.items()}
        positions = coded.positions if ordered else np.concatenate([delta.positions for delta in part])
        plain += _plain_size(coded, positions, [delta.changed for delta in part])
        deltas += part
    ours = replace(header, codec=CONTEXT_CODEC)
    metadata = to_metadata(ours, table)
    from_metadata(metadata, DEFAULT_LIMITS)  # never write what a reader would refuse
    data = write_container(metadata, streams)
    others = {DEFAULT_CODEC, codec_without_base(deltas)}
    if len(others) == 1 and sum(map(len, streams.values())) < plain - _NEAR:
        return ours, data, deltas
    coded_alone = ((one, encode_delta(one, deltas)) for one in (replace(header, codec=name) for name in sorted(others)))
    head, data = min((ours, data), *coded_alone, key=lambda pair: len(pair[1]))
    return head, data, deltas


def _plain_size(coded: Coded, positions: npt.NDArray[np.int64], counts: Sequence[int]) -> int:
    """Bytes that the gap codec takes for a group: of its streams, ``sign`` and ``step_ext`` are those of this codec."""
    gaps = encode_gaps(positions, counts)
    same = len(coded.streams["sign"]) + len(coded.streams["step_ext"])
    return len(compress(gaps)) + len(compress(coded.sizes.tobytes())) + same


Decoded = tuple[DeltaHeader, list[TensorDelta]]


def unpack_if_alone(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Unpacked | bytes:
    """An object unpacked if it decodes without a base, else its bytes, for ``decode_against``; FormatError."""
    opened = open_delta(data, limits)
    return data if opened.header.codec == CONTEXT_CODEC else unpack_frames(opened, limits)


def decode_if_alone(data: bytes, limits: Limits = DEFAULT_LIMITS) -> Decoded | bytes:
    """An object decoded if that needs no base, else its bytes, for ``decode_against``; FormatError."""
    unpacked = unpack_if_alone(data, limits)
    return unpacked if isinstance(unpacked, bytes) else (unpacked.header, unpacked.deltas())


def decode_against(
    data: bytes | memoryview, base: Base, limits: Limits = DEFAULT_LIMITS
) -> tuple[DeltaHeader, list[TensorDelta]]:
    """The header and ULP deltas of one object of any codec; FormatError, and nothing else, if the bytes are not one.

    ``base(name, dtype, shape)`` gives a tensor's bits at the object's base version: with other bits the result is wrong
    (the digests tell) or refused. It is called only for context-coded objects, and its errors are passed on. Where it
    gives a part of a tensor, only changes in that are decoded; MappingError if the tiles do not make up the part.
    """
    opened = open_delta(data, limits)
    header, table, streams = opened.header, opened.table, opened.streams
    if header.codec != CONTEXT_CODEC:
        return header, unpack_frames(opened, limits).deltas()
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
        layers.append(_layer(e, group.dtype, table.grid, base(e.name, group.dtype, e.shape)))
    for entry, (positions, steps) in zip(
        group.entries, decode_group(coded, table, layers, own, limits, thread_count()), strict=True
    ):
        if table.grid[1] > 1:  # tiles side by side: back to row-major order
            order = np.argsort(positions, kind="stable")
            positions, steps = positions[order], steps[order]
        yield TensorDelta(entry.name, group.dtype, entry.shape, "ulp", positions, steps)


def _layer(entry: Entry, dtype: DType, grid: tuple[int, int], base: Bits | PartOf) -> Layer:
    cut = tuple(tiles(entry.shape, grid))
    if not isinstance(base, PartOf):
        return Layer(flat(entry.name, dtype, entry.shape, base), cut)
    held = tuple(base.holds(tile) for tile in cut)
    covered = sum(tile.elements for tile, flag in zip(cut, held, strict=True) if flag)
    if covered != base.elements:
        raise MappingError(
            f"context-coded delta of {entry.name!r}",
            expected=f"tiles that make up the {base.elements} elements on this rank",
            got=f"{grid[0]} x {grid[1]} parts, of which those within cover {covered}",
            remedy="publish with tiles set to the server's tensor-parallel size, or with codec='gap'",
        )
    return Layer(flat(entry.name, dtype, entry.shape, base.bits), cut, held)


def _grouped(tensors: Sequence[_Tensor]) -> Iterator[list[_Tensor]]:
    """Tensors by element type, in groups of bounded size (a tensor is never split)."""
    kinds: dict[str, list[_Tensor]] = {}
    for tensor in tensors:
        kinds.setdefault(tensor.dtype.name, []).append(tensor)
    for members in kinds.values():
        group: list[_Tensor] = []
        elements = 0
        for tensor in members:
            size = tensor.source.layer.old.size
            if group and elements + size > _GROUP_ELEMENTS:
                yield group
                group, elements = [], 0
            group.append(tensor)
            elements += size
        yield group


def _from_bits(change: Change, grid: tuple[int, int]) -> _Tensor:
    old, new = (flat(change.name, change.dtype, change.shape, bits) for bits in (change.old, change.new))
    source = Source(Layer(old, tuple(tiles(change.shape, grid))), new)
    return _Tensor(change.name, change.dtype, change.shape, source)


def _from_delta(delta: TensorDelta, base: Base, grid: tuple[int, int]) -> _Tensor:
    check(delta)
    if delta.encoding != "ulp":
        raise FormatError(f"delta of {delta.name!r}", expected="ULP steps", got=delta.encoding)
    bits = base(delta.name, delta.dtype, delta.shape)
    old = flat(delta.name, delta.dtype, delta.shape, bits.bits if isinstance(bits, PartOf) else bits)
    source = Source(Layer(old, tuple(tiles(delta.shape, grid))), known=(delta.positions, delta.values))
    return _Tensor(delta.name, delta.dtype, delta.shape, source)


def _delta(tensor: _Tensor, positions: npt.NDArray[np.int64], steps: Bits, *, ordered: bool) -> TensorDelta:
    """``ordered``: tiles follow each other; else those side by side are brought back to row-major order."""
    if not ordered:
        order = np.argsort(positions, kind="stable")
        positions, steps = positions[order], steps[order]
    return TensorDelta(tensor.name, tensor.dtype, tensor.shape, "ulp", positions, steps)
