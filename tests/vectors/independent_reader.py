"""Reads delta objects by docs/FORMAT.md alone, with numpy, zstandard and the standard library: nothing of ours.

It believes what it reads; delta_sync is the reader that doubts. Run: python independent_reader.py OBJECT
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path

import numpy as np
import zstandard

WIDTH = {"BF16": 2, "F16": 2, "F32": 4, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1, "U8": 1}
FLOATS = {"BF16", "F16", "F32", "F8_E4M3", "F8_E5M2"}
WORD = 2**64


def read_object(data: bytes) -> tuple[dict[str, str], list[dict]]:
    """The metadata and the tensors' changes: name, dtype, shape, encoding, positions, values (unsigned)."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    body = data[8 + length :]
    contents = {}
    for name, entry in header.items():
        start, end = entry["data_offsets"]
        contents[name] = zstandard.ZstdDecompressor().decompress(body[start:end]) if end > start else b""
    changes = []
    for index, group in enumerate(json.loads(metadata["groups"])):
        streams = {name.split(".")[1]: content for name, content in contents.items() if name.startswith(f"{index}.")}
        changes += read_group(group, streams)
    return metadata, changes


def read_group(group: dict, streams: dict[str, bytes]) -> list[dict]:
    width = WIDTH[group["dtype"]]
    values = read_steps(streams, width) if "step" in streams else read_planes(streams, width)
    changes, at, gaps = [], 0, iter(streams["gap"])
    for name, shape, count in group["tensors"]:
        position, positions = -1, []
        for _ in range(count):
            while (byte := next(gaps)) == 255:
                position += 255
            position += byte + 1
            positions.append(position)
        change = {"name": name, "shape": shape, "dtype": group["dtype"], "encoding": group["encoding"]}
        changes.append(change | {"positions": positions, "values": values[at : at + count]})
        at += count
    return changes


def read_steps(streams: dict[str, bytes], width: int) -> list[int]:
    signs = np.unpackbits(np.frombuffer(streams["sign"], np.uint8), bitorder="little")
    extension = iter(np.frombuffer(streams["step_ext"], f"<u{width}").tolist())
    sizes = [next(extension) if byte == 255 else byte for byte in streams["step"]]
    return [(-(size + 1) if sign else size + 1) % 2 ** (8 * width) for size, sign in zip(sizes, signs, strict=False)]


def read_planes(streams: dict[str, bytes], width: int) -> list[int]:
    planes = [streams[f"plane{k}"] for k in range(width)]
    return [int.from_bytes(bytes(value), "little") for value in zip(*planes, strict=True)]


def ordinal(bits: int, dtype: str) -> int:
    width = 8 * WIDTH[dtype]
    sign = 1 << (width - 1)
    if dtype == "U8":
        return bits
    if dtype in FLOATS and bits & sign:
        return bits ^ (2**width - 1)
    return bits ^ sign


def from_ordinal(value: int, dtype: str) -> int:
    width = 8 * WIDTH[dtype]
    sign = 1 << (width - 1)
    if dtype == "U8":
        return value
    if dtype in FLOATS and not value & sign:
        return value ^ (2**width - 1)
    return value ^ sign


def apply(change: dict, bits: list[int]) -> None:
    """Change a tensor's bits, flat and row-major, in place."""
    dtype = change["dtype"]
    for position, value in zip(change["positions"], change["values"], strict=True):
        if change["encoding"] == "ulp":
            value = from_ordinal((ordinal(bits[position], dtype) + value) % 2 ** (8 * WIDTH[dtype]), dtype)
        bits[position] = value


def digest(name: str, bits: list[int]) -> int:
    """A tensor's digest."""
    key = int.from_bytes(hashlib.sha256(b"delta-sync/digest/1\0" + name.encode()).digest()[:8], "little")
    return sum(factor(key, position) * value for position, value in enumerate(bits)) % WORD


def factor(key: int, position: int) -> int:
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return (z ^ z >> 31) | 1


if __name__ == "__main__":
    print(json.dumps(read_object(Path(sys.argv[1]).read_bytes()), indent=1))
