"""Writes golden context-coded objects: ``python make.py FOLDER`` (refuses an existing one: added, never replaced).

Beside each object lies an .npz with every tensor's bits before (``NAME/old``) and after (``NAME/new``).
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from delta_sync import DTYPES, DeltaHeader
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, encode_against

sys.path.insert(0, str(Path(__file__).parents[1] / "delta"))
from make import EDGES

HEADER = DeltaHeader("golden", 2, 1, "")


def trained(name: str, shape: tuple[int, ...], dtype: str, seed: int) -> Change:
    """Bits before and after a step that moves small values often and far."""
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    old = rng.standard_normal(shape).astype(np.float32) * np.float32(0.02)
    new = old + rng.standard_normal(shape).astype(np.float32) * np.float32(3e-5)
    shift = 32 - 8 * kind.itemsize
    before, after = ((v.view(np.uint32) >> shift).astype(kind.carrier) for v in (old, new))
    return Change(name, kind, shape, before, after)


def edges() -> list[Change]:
    """Every edge value of every dtype into every other."""
    changes = []
    for name, dtype in DTYPES.items():
        bits = np.array(EDGES[dtype.itemsize], dtype.carrier)
        old, new = np.repeat(bits, bits.size), np.tile(bits, bits.size)
        changes.append(Change(name, dtype, (bits.size, bits.size), old, new))
    return changes


def seldom() -> Change:
    """Gaps long enough for planes of low bytes."""
    old = np.full(200_000, 0x3F80, np.uint16)
    new = old.copy()
    new[[0, 5, 70_000, 70_001, 199_999]] += np.arange(1, 6, dtype=np.uint16)
    return Change("seldom", DTYPES["BF16"], (200_000,), old, new)


VECTORS = {
    "tensors": ((1, 1), [trained("größe", (90, 230), "BF16", 1), *edges(), seldom()]),
    "tiles": ((3, 2), [trained("a", (70, 301), "BF16", 2), trained("b", (5, 4, 33), "BF16", 3)]),
    "mixed": ((2, 1), [trained("a", (30, 30), "F32", 4), trained("b", (80, 200), "BF16", 5)]),
}


def main(folder: Path) -> None:
    folder.mkdir(parents=True)
    for name, (grid, changes) in VECTORS.items():
        _, data, _ = encode_against(HEADER, changes, grid)
        if CONTEXT_CODEC.encode() not in data:
            raise SystemExit(f"{name} fell back to the gap codec")
        (folder / f"{name}.safetensors").write_bytes(data)
        arrays = {f"{c.name}/{key}": bits for c in changes for key, bits in (("old", c.old), ("new", c.new))}
        np.savez_compressed(folder / f"{name}.npz", **arrays)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
