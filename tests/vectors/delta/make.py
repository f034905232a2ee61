"""Writes golden delta objects: ``python make.py FOLDER [CODEC]``.

Refuses a folder that exists: vectors are added, never replaced.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from delta_sync import DEFAULT_CODEC, DTYPES, DeltaHeader, TensorDelta, apply, diff, encode_delta, raw, tensor_key
from delta_sync.digest import digest

HEADER = DeltaHeader("golden", 2, 1, DEFAULT_CODEC)
EDGES = {  # zero, minus zero, infinities, NaNs with payloads, subnormals, largest, and neighbours of all of them
    1: [0x00, 0x80, 0x01, 0x81, 0x7C, 0xFC, 0x7D, 0xFE, 0x7F, 0xFF, 0x38, 0x39, 0xB8],
    2: [0x0000, 0x8000, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0xFFFF, 0x7FC0, 0x7C00, 0x3F80, 0x3F81, 0xBF80],
    4: [0, 2**31, 1, 2**31 + 1, 0x7F800000, 0xFF800000, 0x7F800001, 2**32 - 1, 0x7FC00000, 0x3F800000, 0x3F800001],
}


def tiny() -> list[TensorDelta]:
    """The worked example of docs/FORMAT.md: 1.0 and its neighbour, a sign flip of zero, a far jump."""
    old = np.array([0x3F80, 0x0000, 0xC000, 0x4040, 0x3F80, 0x3F80], np.uint16)
    new = np.array([0x3F81, 0x8000, 0xC000, 0x4040, 0x4000, 0x3F80], np.uint16)
    return [diff("w", DTYPES["BF16"], (2, 3), old, new)]


def every_dtype() -> list[TensorDelta]:
    """Every edge value into every other, by steps and by raw values."""
    deltas = []
    for name, dtype in DTYPES.items():
        edges = np.array(EDGES[dtype.itemsize], dtype.carrier)
        old, new = np.repeat(edges, edges.size), np.tile(edges, edges.size)
        steps = diff(f"{name}.steps", dtype, (edges.size, edges.size), old, new)
        deltas += [steps, raw(f"{name}.raw", dtype, steps.shape, steps.positions, new[steps.positions])]
    return deltas


def shapes() -> list[TensorDelta]:
    """Gaps around every multiple of 255, no elements, one element, no change, and a tensor in both encodings."""
    bf16 = DTYPES["BF16"]
    at = np.cumsum(np.array([0, 0, 253, 254, 255, 256, 509, 510, 511, 5000]) + 1) - 1
    some = np.arange(at.size, dtype=np.uint16)
    none = np.empty(0, np.uint16)
    one = np.array([7], np.uint16)
    return [
        raw("gaps", bf16, (90, 90), at, some),
        raw("nothing", bf16, (3, 0, 2), np.empty(0, np.int64), none),
        diff("größe", bf16, (), one, one + np.uint16(300)),
        diff("same", bf16, (1,), one, one),
        TensorDelta("both", bf16, (9,), "ulp", np.array([1, 3, 8]), np.array([1, 0x8000, 0xFFFF], np.uint16)),
        raw("both", bf16, (9,), np.array([0, 2, 4]), np.array([0xFFFF, 0, 0x8000], np.uint16)),
    ]


VECTORS = {
    "tiny": (HEADER, tiny()),
    "every_dtype": (HEADER, every_dtype()),
    "shapes": (DeltaHeader("golden", 999_999_999_999, 41, DEFAULT_CODEC, {"note": "ümlaut\n"}), shapes()),
    "empty": (HEADER, []),
}


def expected(delta: TensorDelta) -> dict[str, object]:
    """What a reader must find, and the digest it must then have if all elements were 1 bit patterns before."""
    bits = np.ones(int(np.prod(delta.shape, dtype=int)), delta.dtype.carrier)
    apply(delta, bits)
    return {
        "name": delta.name,
        "dtype": delta.dtype.name,
        "shape": list(delta.shape),
        "encoding": delta.encoding,
        "positions": delta.positions.tolist(),
        "values": delta.values.tolist(),
        "digest_after_ones": f"{digest(bits, tensor_key(delta.name)):016x}",
    }


def main(folder: Path, codec: str = DEFAULT_CODEC) -> None:
    folder.mkdir(parents=True)
    table = {}
    for name, (header, deltas) in VECTORS.items():
        header = replace(header, codec=codec)
        (folder / f"{name}.safetensors").write_bytes(encode_delta(header, deltas))
        fields = {"run": header.run, "version": header.version, "base_version": header.base_version}
        fields |= {"codec": header.codec, "extra": dict(header.extra)}
        by_group = sorted(
            deltas, key=lambda d: [(e.encoding, e.dtype.name) for e in deltas].index((d.encoding, d.dtype.name))
        )
        table[name] = {"header": fields, "deltas": [expected(delta) for delta in by_group]}
    (folder / "expected.json").write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
