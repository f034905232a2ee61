"""Reading a group of tensors that was coded by the contexts of their old bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.codec import Group
from delta_sync.context_codec import Layer, context_field, place
from delta_sync.context_model import class_table
from delta_sync.context_part import part_of_steps
from delta_sync.context_scan import select
from delta_sync.context_streams import Bytes, Words, gather, read_gaps
from delta_sync.context_table import UNARY, Table, low_planes
from delta_sync.errors import FormatError
from delta_sync.frames import content_size, decompress
from delta_sync.gaps import MORE, slices
from delta_sync.limits import Limits
from delta_sync.steps import decode_steps, sign_bytes
from delta_sync.threads import on_threads, shares


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
    group: Group, table: Table, layers: Sequence[Layer], streams: Mapping[str, memoryview], limits: Limits, threads: int
) -> list[tuple[npt.NDArray[np.int64], Bits]]:
    """Positions, in tile order, and ULP steps of each tensor, in the tiles that are held.

    FormatError unless the streams hold exactly the group; MappingError if it does not let a reader leave tiles out.
    """
    counts = _read_counts(group, table, layers, streams["count"])
    totals = [int(n) for n in counts.sum(axis=0)]
    _check_frames(group, table, totals, streams, limits)
    gaps = _read_gaps(group, table, totals, streams, threads)
    held = np.array([flag for layer in layers for flag in layer.held or [True] * len(layer.tiles)], np.bool_)
    changes = int(counts[held].sum())
    positions, contexts = np.empty(changes, np.int64), np.empty(changes, np.uint8)
    _select(group, table, layers, (counts, held), gaps, (positions, contexts), threads)
    if held.all():
        steps = _read_steps(group, table, contexts, streams, threads)
    else:
        steps = part_of_steps(group, table, counts, held, contexts, streams)
    per_tensor = [int(counts[part][held[part]].sum()) for part in slices([len(layer.tiles) for layer in layers])]
    return [(positions[part], steps[part]) for part in slices(per_tensor)]


def _select(
    group: Group,
    table: Table,
    layers: Sequence[Layer],
    counted: tuple[Words, npt.NDArray[np.bool_]],
    gaps: Words,
    out: tuple[npt.NDArray[np.int64], Bytes],
    threads: int,
) -> None:
    """Positions and contexts of the tiles that are held; FormatError."""
    counts, held = counted
    jobs = [(layer, tile) for layer in layers for tile in layer.tiles]
    mine = np.flatnonzero(held).tolist()
    ends = np.cumsum(counts.sum(axis=1) * held).tolist()
    before = np.cumsum(counts, axis=0, dtype=np.uint64) - counts  # of each tile and class: changes in earlier tiles
    starts = np.concatenate(([0], np.cumsum(counts.sum(axis=0))[:-1])).astype(np.uint64)
    firsts, how = np.asarray(table.firsts, np.uint8), context_field(group.dtype)

    def run(part: slice) -> bool:
        for k in mine[part]:
            layer, tile = jobs[k]
            here = slice(ends[k - 1] if k else 0, ends[k])
            room = tuple(a[here] for a in out)
            if not select(layer.old, place(tile), how, firsts, counts[k].copy(), gaps, starts + before[k], room):
                return False
        return True

    if not all(on_threads(run, shares((jobs[k][1].elements for k in mine), threads), threads)):
        raise FormatError(f"{group.label} gaps", expected="positions within a tile", got="gaps that lead beyond it")


def _read_counts(group: Group, table: Table, layers: Sequence[Layer], frame: memoryview) -> Words:
    """Changes of each tile and class, uint64 ``[tiles, classes]``, checked against the tensors' counts."""
    what = f"{group.label} stream count"
    rows, classes = sum(len(layer.tiles) for layer in layers), len(table.firsts)
    size = content_size(frame, what)
    if size != 8 * rows * classes:
        raise FormatError(what, expected=f"{8 * rows * classes} bytes of content", got=size)
    planes = np.frombuffer(decompress(frame, what), np.uint8).reshape(8, -1)
    flat: Words = np.ascontiguousarray(planes.T).view(np.uint64).reshape(classes, rows)
    if (flat > group.changed).any():
        raise FormatError(what, expected=f"at most {group.changed} changes", got=int(flat.max()))
    counts = np.ascontiguousarray(flat.T)
    for part, count in zip(slices([len(layer.tiles) for layer in layers]), group.counts, strict=True):
        got = int(counts[part].sum(dtype=object)) if part.stop > part.start else 0
        if got != count:
            raise FormatError(what, expected=f"{count} changes of a tensor", got=got)
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
    signs = content_size(streams["sign"], f"{group.label} stream sign")
    _check_size(group, "sign", signs, sign_bytes(n), sign_bytes(n))


def _check_size(group: Group, name: str, size: int, least: int, most: int, unit: int = 1) -> None:
    if not least <= size <= most or size % unit:
        expected = f"{most} bytes" if least == most else f"{least} to {most} bytes in units of {unit}"
        raise FormatError(f"{group.label} stream {name}", expected=f"{expected} of content", got=size)


def _read_gaps(
    group: Group, table: Table, totals: Sequence[int], streams: Mapping[str, memoryview], threads: int
) -> Words:
    """All gaps, class after class; FormatError if one is longer than the tensors."""
    gaps, longest, low = np.empty(sum(totals), np.uint64), sum(group.sizes), table.frames("low", streams)
    jobs = [
        (frame, [next(low) for _ in range(low_planes(split))], split, gaps[part])
        for frame, split, part in zip(table.frames("gap", streams), table.splits, slices(totals), strict=True)
    ]

    def run(job: tuple[memoryview, list[memoryview], int, Words]) -> None:
        frame, planes, split, out = job
        content = decompress(frame, f"{group.label} stream gap")
        lows = [decompress(plane, f"{group.label} stream low") for plane in planes]
        read_gaps(content, lows, split, longest, out, f"{group.label} gaps")

    on_threads(run, jobs, threads)
    return gaps


def _read_steps(group: Group, table: Table, contexts: Bytes, streams: Mapping[str, memoryview], threads: int) -> Bits:
    what = f"{group.label} steps"
    held = np.bincount(class_table(table.step_firsts)[contexts], minlength=len(table.step_firsts)).tolist()
    frames = list(table.frames("step", streams))
    contents = on_threads(lambda frame: decompress(frame, f"{group.label} stream step"), frames, threads)
    for c, (content, count) in enumerate(zip(contents, held, strict=True)):
        if len(content) != count:
            raise FormatError(f"{what} of class {c}", expected=f"{count} bytes", got=len(content))
    sizes = gather(contexts, contents, table.step_firsts)
    extension = decompress(streams["step_ext"], f"{group.label} stream step_ext")
    signs = decompress(streams["sign"], f"{group.label} stream sign")
    return decode_steps(sizes, extension, signs, group.dtype, what)
