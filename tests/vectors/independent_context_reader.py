"""Reads context-coded objects by docs/FORMAT.md 5.4 alone, with numpy, zstandard and the standard library.

It believes what it reads, an element at a time; delta_sync is the reader that doubts.
"""

from __future__ import annotations

import json
import math
import struct

import numpy as np
import zstandard

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
EXPONENT = {"BF16": (7, 8), "F16": (10, 5), "F32": (23, 8), "F8_E4M3": (3, 4), "F8_E5M2": (2, 5)}


def read_object(data: bytes, base: dict[str, list[int]]) -> tuple[dict[str, str], dict[str, dict[int, int]]]:
    """The metadata, and of each tensor position -> step, given all tensors' old bits, flat."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = data[8 + length :]
    streams = {name: body[slice(*entry["data_offsets"])] for name, entry in header.items()}
    found = {}
    for index, group in enumerate(json.loads(metadata["groups"])):
        own = {name.split(".")[1]: frame for name, frame in streams.items() if name.startswith(f"{index}.")}
        found |= read_group(group, own, base)
    return metadata, found


def unpack(frame: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(frame) if frame else b""


def context(bits: int, dtype: str) -> int:
    shift, width = EXPONENT.get(dtype, (0, 0))
    return (bits >> shift) & ((1 << width) - 1)


def class_of(firsts: bytes, number: int) -> int:
    return max(k for k, first in enumerate(firsts) if first <= number)


def tiles(shape: list[int], parts: list[int]) -> list[list[int]]:
    """Each tile's positions."""
    rows, columns = (math.prod(shape[:-1]), shape[-1]) if len(shape) > 1 else (math.prod(shape), 1)
    down, across = min(parts[0], rows), min(parts[1], columns)
    return [
        [
            row * columns + column
            for row in range(i * rows // down, (i + 1) * rows // down)
            for column in range(j * columns // across, (j + 1) * columns // across)
        ]
        for i in range(down)
        for j in range(across)
    ]


def read_group(group: dict, streams: dict[str, bytes], base: dict[str, list[int]]) -> dict[str, dict[int, int]]:
    table, dtype = unpack(streams["table"]), group["dtype"]
    classes, step_classes, *parts = struct.unpack_from("<BBHH", table)
    firsts, splits = table[6 : 6 + classes], table[6 + classes : 6 + 2 * classes]
    at = 6 + 2 * classes + step_classes
    step_firsts = table[6 + 2 * classes : at]
    lengths = iter(struct.unpack(f"<{(len(table) - at) // 8}Q", table[at:]))
    low_planes = [0 if split == 255 else split for split in splits]
    gap = frames(streams["gap"], [next(lengths) for _ in range(classes)])
    low = iter(frames(streams["low"], [next(lengths) for _ in range(sum(low_planes))]))
    step = [iter(f) for f in frames(streams["step"], [next(lengths) for _ in range(step_classes)])]
    cut = {name: tiles(shape, parts) for name, shape, _ in group["tensors"]}
    n = sum(map(len, cut.values()))
    planes = np.frombuffer(unpack(streams["count"]), np.uint8).reshape(8, -1)
    counts = np.ascontiguousarray(planes.T).view("<u8").reshape(classes, n)
    gaps = [
        iter(read_gaps(gap[k], [next(low) for _ in range(low_planes[k])], splits[k], int(counts[k].sum())))
        for k in range(classes)
    ]
    extension = iter(np.frombuffer(unpack(streams["step_ext"]), f"<u{WIDTH[dtype]}").tolist())
    signs = iter(np.unpackbits(np.frombuffer(unpack(streams["sign"]), np.uint8), bitorder="little").tolist())
    found, number = {}, 0
    for name, _, count in group["tensors"]:
        old, steps = base[name], {}
        for tile in cut[name]:
            for position in changed_in(tile, old, dtype, firsts, [int(c) for c in counts[:, number]], gaps):
                size = next(step[class_of(step_firsts, context(old[position], dtype))])
                size = next(extension) if size == 255 else size
                steps[position] = (-(size + 1) if next(signs) else size + 1) % 2 ** (8 * WIDTH[dtype])
            number += 1
        assert len(steps) == count
        found[name] = steps
    return found


def frames(stream: bytes, lengths: list[int]) -> list[bytes]:
    ends = np.cumsum(lengths).tolist()
    return [unpack(stream[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def read_gaps(content: bytes, low: list[bytes], split: int, count: int) -> list[int]:
    if split == 255:
        ones = np.flatnonzero(np.unpackbits(np.frombuffer(content, np.uint8), bitorder="little")).tolist()
        return [at - before - 1 for before, at in zip([-1, *ones], ones, strict=False)]
    gaps, source = [], iter(content)
    for i in range(count):
        high = 0
        while (byte := next(source)) == 255:
            high += 255
        gaps.append(((high + byte) << (8 * split)) + sum(plane[i] << (8 * k) for k, plane in enumerate(low)))
    return gaps


def changed_in(tile: list[int], old: list[int], dtype: str, firsts: bytes, left: list[int], gaps: list) -> list[int]:
    """The tile's changed positions, in order."""
    ahead = [next(gaps[k]) if left[k] else -1 for k in range(len(firsts))]
    changed = []
    for position in tile:
        k = class_of(firsts, context(old[position], dtype))
        if left[k] and ahead[k] == 0:
            changed.append(position)
            left[k] -= 1
            ahead[k] = next(gaps[k]) if left[k] else -1
        else:
            ahead[k] -= 1
    return changed
