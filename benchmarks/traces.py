"""Real deltas as files: train SmolLM2-135M by a recipe and keep what chosen steps changed in the bfloat16 image.

Run: python benchmarks/traces.py --lr 3e-6 --keep 20 59 --out /tmp/traces
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from real_deltas import Change

CUT = ("model.layers.3.self_attn.q_proj.weight", "model.layers.15.mlp.down_proj.weight", "model.norm.weight")


@dataclass(frozen=True)
class TracedChange:
    """One tensor before and after an optimizer step: uint16 bits ``[n]``, and the shape."""

    name: str
    shape: tuple[int, ...]
    old: np.ndarray
    new: np.ndarray


def save(path: Path, changes: Sequence[Change | TracedChange], made: dict[str, Any]) -> None:
    """Write a trace: old bits and their XOR with the new ones, of each tensor, and how it was ``made``."""
    arrays = {"made": np.frombuffer(json.dumps(made).encode(), np.uint8)}
    for c in changes:
        arrays[f"{c.name}/old"] = c.old.reshape(c.shape)
        arrays[f"{c.name}/xor"] = (c.old ^ c.new).reshape(c.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def load(path: Path) -> tuple[list[TracedChange], dict[str, Any]]:
    """A trace's changes, and how it was made."""
    with np.load(path) as file:
        made = json.loads(file["made"].tobytes())
        changes = []
        for name in (key.removesuffix("/old") for key in file.files if key.endswith("/old")):
            old = file[f"{name}/old"]
            changes.append(TracedChange(name, old.shape, old.reshape(-1), (old ^ file[f"{name}/xor"]).reshape(-1)))
    return changes, made


def cut(changes: Sequence[Change], rows: int) -> list[TracedChange]:
    """A few tensors' first rows: small enough to keep beside the tests."""
    kept = []
    for c in changes:
        if c.name in CUT:
            shape = (min(rows, c.shape[0]), *c.shape[1:]) if len(c.shape) > 1 else c.shape
            size = int(np.prod(shape))
            kept.append(TracedChange(c.name, shape, c.old[:size], c.new[:size]))
    return kept


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument("--objective", choices=("policy", "sft"), default="policy")
    parser.add_argument("--masters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compute", choices=("auto", "bfloat16", "float32"), default="auto")
    parser.add_argument("--keep", type=int, nargs="+", default=[20], help="steps to keep, the first is 0")
    parser.add_argument("--rows", type=int, help="keep only so many rows of a few tensors")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import real_deltas  # torch and transformers are for this alone

    recipe = real_deltas.Recipe(options.lr, options.weight_decay, options.objective, options.masters)
    kind = real_deltas.compute_type(options.compute)
    steps = real_deltas.train(*real_deltas.load_model(), recipe, max(options.keep) + 1, kind)
    for index, step in enumerate(steps):
        share = sum(int((c.old != c.new).sum()) for c in step) / sum(c.old.size for c in step)
        print(f"step {index:>3}: {share:.3%} changed", flush=True)
        if index in options.keep:
            made = {"model": "SmolLM2-135M", **dataclasses.asdict(recipe), "compute": str(kind), "step": index}
            path = options.out / f"lr{options.lr:g}-{options.masters}-{options.objective}-step{index}.npz"
            save(path, step if options.rows is None else cut(step, options.rows), made | {"rows": options.rows})
            print(f"wrote {path}")


if __name__ == "__main__":
    main()
