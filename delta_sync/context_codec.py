"""The codec "context8-ulp8-zstd": gaps counted among elements of a class of old bits, and steps coded by class.

Both sides hold the old bits, so what they tell about a change is free on the wire. docs/FORMAT.md 5.4 specifies it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.codec import Group
from delta_sync.context_model import CONTEXTS, Tile, choose_classes, class_table
from delta_sync.context_scan import Found, contexts_of, scan, select
from delta_sync.context_table import UNARY, Table, low_planes
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.frames import compress, compress_symbols, content_size, decompress
from delta_sync.gaps import MORE, decode_gap_values, encode_gap_values
from delta_sync.limits import Limits
from delta_sync.steps import decode_steps, encode_steps, sign_bytes

CONTEXT_CODEC = "context8-ulp8-zstd"
STREAMS = ("table", "count", "gap", "low", "step", "step_ext", "sign")
_POSITION_CLASSES, _STEP_CLASSES = 7, 16  # more would cost time at each element, and gain below 1 %
_UNARY_BELOW = 3  # mean gap below which a bit an element is the better code
_CLASS_BITS = 8 * 60  # what a class takes: entropy tables, frame headers, counts
_SAMPLE, _PIECE = 2**21, 4096  # classes are chosen from about so many elements, in pieces of so many


@dataclass(frozen=True)
class Layer:
    """One tensor to code or decode: flat old bits, the tiles it is cut into, and flat new bits when coding."""

    old: Bits
    tiles: tuple[Tile, ...]
    new: Bits | None = None


def encode_group(dtype: DType, layers: Sequence[Layer], grid: tuple[int, int]) -> tuple[dict[str, bytes], list[Found]]:
    """The streams of tensors of one dtype, all with ``new`` bits, and what changed in each tensor, in tile order."""
    firsts = _position_classes(dtype, layers)
    table = class_table(firsts)
    found = [[scan(layer.old, _new(layer), dtype, tile, firsts) for tile in layer.tiles] for layer in layers]
    parts = [part for tiles in found for part in tiles]
    counts = np.array([np.bincount(table[part[2]], minlength=len(firsts)) for part in parts], np.uint64)
    counts = counts.reshape(-1, len(firsts))
    _, gaps, contexts, steps = joined(parts, dtype)
    by_class = _split_by(gaps, table[contexts], len(firsts))
    splits = [_split_of(values) for values in by_class]
    gap = [compress_symbols(_gap_bytes(g, k)) for g, k in zip(by_class, splits, strict=True)]
    low = [compress_symbols(p) for g, k in zip(by_class, splits, strict=True) for p in _planes(g, low_planes(k))]
    sizes, extension, signs = encode_steps(steps, dtype)
    size_bytes = np.frombuffer(sizes, np.uint8)
    step_firsts = _step_classes(contexts, size_bytes)
    by_step = _split_by(size_bytes, class_table(step_firsts)[contexts], len(step_firsts))
    step = [compress_symbols(values.tobytes()) for values in by_step]
    lengths = [[len(frame) for frame in frames] for frames in (gap, low, step)]
    head = Table(grid, tuple(firsts), tuple(splits), tuple(step_firsts), *map(tuple, lengths))
    contents = (compress(head.to_bytes()), compress(b"".join(_planes(counts.T.reshape(-1), 8))))
    tail = (compress(extension), compress(signs))
    streams = dict(zip(STREAMS, (*contents, *map(b"".join, (gap, low, step)), *tail), strict=True))
    return streams, [joined(tiles, dtype) for tiles in found]


def read_table(streams: Mapping[str, memoryview], label: str) -> Table:
    """The table that says how a group is coded; FormatError."""
    size = content_size(streams["table"], f"{label} stream table")
    if size > Table.MOST_BYTES:
        raise FormatError(f"{label} stream table", expected=f"at most {Table.MOST_BYTES} bytes of content", got=size)
    table = Table.from_bytes(decompress(streams["table"], f"{label} stream table"), f"{label} table")
    for name, lengths in (("gap", table.gap), ("low", table.low), ("step", table.step)):
        if sum(lengths) != len(streams[name]):
            raise FormatError(f"{label} stream {name}", expected=f"{sum(lengths)} bytes", got=len(streams[name]))
    return table


def decode_group(
    group: Group, table: Table, layers: Sequence[Layer], streams: Mapping[str, memoryview], limits: Limits
) -> list[tuple[npt.NDArray[np.int64], Bits]]:
    """Positions, in tile order, and ULP steps of each tensor; FormatError unless the streams hold exactly the group."""
    what, changed = group.label, group.changed
    counts = _read_counts(group, table, layers, streams["count"])
    totals = [int(n) for n in counts.sum(axis=0)]
    _check_frames(group, table, totals, streams, limits)
    gaps = _read_gaps(group, table, totals, streams)
    positions = np.empty(changed, np.int64)
    contexts = np.empty(changed, np.uint8)
    at_gap = np.cumsum([0, *totals[:-1]]).astype(np.uint64)
    at, row, ends = 0, 0, []
    for layer in layers:
        begin = at
        for tile in layer.tiles:
            end = at + int(counts[row].sum())
            if not select(
                layer.old, group.dtype, tile, list(table.firsts), counts[row], gaps, at_gap, positions[at:end]
            ):
                raise FormatError(f"{what} gaps", expected="positions within a tile", got="gaps that lead beyond it")
            at, row = end, row + 1
        ends.append(at)
        contexts[begin:at] = contexts_of(layer.old[positions[begin:at]], group.dtype)
    steps = _read_steps(group, table, contexts, streams)
    starts = [0, *ends[:-1]]
    return [(positions[a:b], steps[a:b]) for a, b in zip(starts, ends, strict=True)]


def joined(parts: Sequence[Found], dtype: DType) -> Found:
    """The changes of several tiles as one, in their order."""
    if not parts:
        return np.empty(0, np.int64), np.empty(0, np.uint64), np.empty(0, np.uint8), np.empty(0, dtype.carrier)
    if len(parts) == 1:
        return parts[0]
    positions, gaps, contexts, steps = zip(*parts, strict=True)
    return np.concatenate(positions), np.concatenate(gaps), np.concatenate(contexts), np.concatenate(steps)


def _new(layer: Layer) -> Bits:
    if layer.new is None:
        raise ValueError("a layer to encode has new bits")
    return layer.new


def _position_classes(dtype: DType, layers: Sequence[Layer]) -> list[int]:
    """Classes chosen from a sample of all elements: how often each context changes."""
    counts = np.zeros((CONTEXTS, 2), np.int64)
    for old, new in _sample(layers):
        contexts, changed = contexts_of(old, dtype), old != new
        counts[:, 1] += np.bincount(contexts[changed], minlength=CONTEXTS)
        counts[:, 0] += np.bincount(contexts[~changed], minlength=CONTEXTS)
    elements = max(1, sum(layer.old.size for layer in layers))
    return choose_classes(counts, _POSITION_CLASSES, _CLASS_BITS * int(counts.sum()) // elements)


def _sample(layers: Sequence[Layer]) -> Iterator[tuple[Bits, Bits]]:
    """Pieces at equal distances in all tensors laid one after the other."""
    every = _PIECE * max(1, sum(layer.old.size for layer in layers) // _SAMPLE)
    at = 0
    for layer in layers:
        for begin in range(at, layer.old.size, every):
            yield layer.old[begin : begin + _PIECE], _new(layer)[begin : begin + _PIECE]
        at = (at - layer.old.size) % every


def _step_classes(contexts: npt.NDArray[np.uint8], sizes: npt.NDArray[np.uint8]) -> list[int]:
    pairs = contexts.astype(np.int64) * CONTEXTS + sizes
    counts = np.bincount(pairs, minlength=CONTEXTS**2).reshape(CONTEXTS, CONTEXTS)
    return choose_classes(counts, _STEP_CLASSES, _CLASS_BITS)


def _split_by(values: Bits, classes: npt.NDArray[np.uint8], n: int) -> list[Bits]:
    """The values of each class, in their order (sorting bytes is one counting pass)."""
    ends = np.cumsum(np.bincount(classes, minlength=n))
    return np.split(values[np.argsort(classes, kind="stable")], ends[:-1])


def _split_of(gaps: npt.NDArray[np.uint64]) -> int:
    """UNARY where many elements change, else how many low bytes of long gaps go into planes of their own."""
    mean, k = (int(gaps.sum()) // gaps.size if gaps.size else 0), 0
    if mean < _UNARY_BELOW:
        return UNARY
    while mean >> (8 * k) > MORE:
        k += 1
    return k


def _gap_bytes(gaps: npt.NDArray[np.uint64], split: int) -> bytes:
    if split != UNARY:
        return encode_gap_values(gaps >> np.uint64(8 * split))
    ends = np.cumsum(gaps.astype(np.int64) + 1)
    flags = np.zeros(ends[-1] if ends.size else 0, np.bool_)
    flags[ends - 1] = True
    return np.packbits(flags, bitorder="little").tobytes()


def _planes(values: npt.NDArray[np.uint64], n: int) -> list[bytes]:
    """The first ``n`` bytes of uint64 values, the least significant first."""
    return [(values >> np.uint64(8 * k)).astype(np.uint8).tobytes() for k in range(n)]


def _read_counts(group: Group, table: Table, layers: Sequence[Layer], frame: memoryview) -> npt.NDArray[np.uint64]:
    """Changes of each tile and class, uint64 ``[tiles, classes]``, checked against the tensors' counts."""
    what = f"{group.label} stream count"
    rows, classes = sum(len(layer.tiles) for layer in layers), len(table.firsts)
    size = content_size(frame, what)
    if size != 8 * rows * classes:
        raise FormatError(what, expected=f"{8 * rows * classes} bytes of content", got=size)
    planes = np.frombuffer(decompress(frame, what), np.uint8).reshape(8, -1)
    flat: npt.NDArray[np.uint64] = np.ascontiguousarray(planes.T).view(np.uint64).reshape(classes, rows)
    if (flat > group.changed).any():
        raise FormatError(what, expected=f"at most {group.changed} changes", got=int(flat.max()))
    counts, at = np.ascontiguousarray(flat.T), 0
    for layer, count in zip(layers, group.counts, strict=True):
        end = at + len(layer.tiles)
        got = sum(int(n) for n in counts[at:end].reshape(-1))
        if got != count:
            raise FormatError(what, expected=f"{count} changes of a tensor", got=got)
        at = end
    return counts


def _check_frames(
    group: Group, table: Table, totals: Sequence[int], streams: Mapping[str, memoryview], limits: Limits
) -> None:
    """FormatError unless every frame declares a size that the group can have, before any is unpacked."""
    elements, width, n = sum(group.sizes), group.dtype.itemsize, group.changed
    for frame, count, k in zip(table.frames("gap", streams), totals, table.splits, strict=True):
        least, most = (-(-count // 8), -(-elements // 8)) if k == UNARY else (count, count + elements // MORE)
        most = min(most, limits.decoded_bytes) if count else 0
        _check_size(group, "gap", content_size(frame, f"{group.label} stream gap"), least, most)
    planes = [count for count, k in zip(totals, table.splits, strict=True) for _ in range(low_planes(k))]
    for frame, count in zip(table.frames("low", streams), planes, strict=True):
        _check_size(group, "low", content_size(frame, f"{group.label} stream low"), count, count)
    steps = sum(content_size(frame, f"{group.label} stream step") for frame in table.frames("step", streams))
    _check_size(group, "step", steps, n, n)
    extension = content_size(streams["step_ext"], f"{group.label} stream step_ext")
    _check_size(group, "step_ext", extension, 0, n * width, width)
    _check_size(
        group, "sign", content_size(streams["sign"], f"{group.label} stream sign"), sign_bytes(n), sign_bytes(n)
    )


def _check_size(group: Group, name: str, size: int, least: int, most: int, unit: int = 1) -> None:
    if not least <= size <= most or size % unit:
        expected = f"{most} bytes" if least == most else f"{least} to {most} bytes in units of {unit}"
        raise FormatError(f"{group.label} stream {name}", expected=f"{expected} of content", got=size)


def _read_gaps(
    group: Group, table: Table, totals: Sequence[int], streams: Mapping[str, memoryview]
) -> npt.NDArray[np.uint64]:
    """All gaps, class after class; FormatError if one is longer than the tensors."""
    elements, planes = sum(group.sizes), table.frames("low", streams)
    parts = [np.empty(0, np.uint64)]
    for frame, count, k in zip(table.frames("gap", streams), totals, table.splits, strict=True):
        content = decompress(frame, f"{group.label} stream gap")
        gaps = _read_unary(content, count, group) if k == UNARY else decode_gap_values(content, count, group.label)
        if (gaps > np.uint64(elements >> (8 * low_planes(k)))).any():
            raise FormatError(f"{group.label} gaps", expected=f"at most {elements}", got="longer ones")
        gaps <<= np.uint64(8 * low_planes(k))
        for j in range(low_planes(k)):
            plane = np.frombuffer(decompress(next(planes), f"{group.label} stream low"), np.uint8)
            gaps |= plane.astype(np.uint64) << np.uint64(8 * j)
        parts.append(gaps)
    return np.concatenate(parts)


def _read_unary(content: bytes, count: int, group: Group) -> npt.NDArray[np.uint64]:
    flags = np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little").view(np.bool_)
    at = np.flatnonzero(flags)
    if at.size != count or (count and at[-1] // 8 != len(content) - 1):
        raise FormatError(f"{group.label} gaps", expected=f"{count} ones, the last in the last byte", got=at.size)
    gaps: npt.NDArray[np.uint64] = (np.diff(at, prepend=-1) - 1).astype(np.uint64)
    return gaps


def _read_steps(group: Group, table: Table, contexts: npt.NDArray[np.uint8], streams: Mapping[str, memoryview]) -> Bits:
    classes = class_table(table.step_firsts)[contexts]
    held = np.bincount(classes, minlength=len(table.step_firsts)).tolist()
    contents = [decompress(frame, f"{group.label} stream step") for frame in table.frames("step", streams)]
    for c, (content, count) in enumerate(zip(contents, held, strict=True)):
        if len(content) != count:
            raise FormatError(f"{group.label} steps of class {c}", expected=f"{count} bytes", got=len(content))
    sizes = np.empty(contexts.size, np.uint8)
    sizes[np.argsort(classes, kind="stable")] = np.frombuffer(b"".join(contents), np.uint8)
    extension = decompress(streams["step_ext"], f"{group.label} stream step_ext")
    signs = decompress(streams["sign"], f"{group.label} stream sign")
    return decode_steps(sizes.tobytes(), extension, signs, group.dtype, f"{group.label} steps")
