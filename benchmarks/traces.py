"""Real deltas as files: train SmolLM2-135M by a recipe and keep what chosen steps changed in the bfloat16 image.

Run: python benchmarks/traces.py --lr 3e-6 --keep 20 59 --out /tmp/traces
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import real_deltas
    from real_deltas import Change

CUT = ("model.layers.3.self_attn.q_proj.weight", "model.layers.15.mlp.down_proj.weight", "model.norm.weight")


@dataclass(frozen=True)
class TracedChange:
    """One tensor before and after an optimizer step: uint16 bits ``[n]``, and the shape."""

    name: str
    shape: tuple[int, ...]
    old: np.ndarray
    new: np.ndarray


def save(path: Path, changes: Sequence[Change | TracedChange], made: dict[str, Any], start: Path | None = None) -> None:
    """Write a trace: old bits and their XOR with the new ones, of each tensor, and how it was ``made``.

    With ``start``, another trace in the same folder, old bits are kept as XOR with that one's: small, where a run began
    from them.
    """
    arrays = {"made": np.frombuffer(json.dumps(made | ({"start": start.name} if start else {})).encode(), np.uint8)}
    first = {c.name: c.old for c in load(start)[0]} if start else {}
    for c in changes:
        arrays[f"{c.name}/old"] = (c.old ^ first.get(c.name, c.old.dtype.type(0))).reshape(c.shape)
        arrays[f"{c.name}/xor"] = (c.old ^ c.new).reshape(c.shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez_compressed(path, **arrays)


def load(path: Path) -> tuple[list[TracedChange], dict[str, Any]]:
    """A trace's changes, and how it was made."""
    with np.load(path) as file:
        made = json.loads(file["made"].tobytes())
        first = {c.name: c.old for c in load(path.parent / made["start"])[0]} if "start" in made else {}
        changes = []
        for name in (key.removesuffix("/old") for key in file.files if key.endswith("/old")):
            old = file[f"{name}/old"]
            bits = old.reshape(-1) ^ first.get(name, old.dtype.type(0))
            changes.append(TracedChange(name, old.shape, bits, bits ^ file[f"{name}/xor"].reshape(-1)))
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


def file_name(recipe: real_deltas.Recipe, step: int) -> str:
    """What a run's trace of one step is called."""
    decay = f"-decay{recipe.weight_decay:g}" if recipe.weight_decay else ""
    return f"lr{recipe.lr:g}-{recipe.masters}-{recipe.objective}{decay}-step{step}.npz"


def run(recipe: real_deltas.Recipe, steps: int, compute: str, keep: Callable[[int, Sequence[Change]], None]) -> str:
    """Train, handing each step's changes to ``keep``; the compute type."""
    import real_deltas  # torch and transformers are for this alone

    if recipe.objective in ("grpo", "sft"):
        import real_runs

        real_runs.run(recipe, steps, keep)
        return "float32"
    kind = real_deltas.compute_type(compute)
    for index, step in enumerate(real_deltas.train(*real_deltas.load_model(), recipe, steps, kind)):
        keep(index, step)
    return str(kind).removeprefix("torch.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--weight-decay", type=float, default=0.0)
    parser.add_argument(
        "--objective",
        choices=("grpo", "sft", "policy"),
        default="grpo",
        help="TRL's GRPOTrainer or SFTTrainer, or a policy-gradient loss with random advantages, which is faster",
    )
    parser.add_argument("--masters", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--compute", choices=("auto", "bfloat16", "float32"), default="auto", help="of policy")
    parser.add_argument("--keep", type=int, nargs="+", default=[20], help="steps to keep, the first is 0")
    parser.add_argument("--rows", type=int, help="keep only so many rows of a few tensors")
    parser.add_argument("--start", type=Path, help="a cut trace of step 0 in --out, to keep the others' old bits by")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import real_deltas

    recipe = real_deltas.Recipe(options.lr, options.weight_decay, options.objective, options.masters)

    def keep(index: int, step: Sequence[Change]) -> None:
        share = sum(int((c.old != c.new).sum()) for c in step) / sum(c.old.size for c in step)
        print(f"step {index:>3}: {share:.3%} changed", flush=True)
        if index in options.keep:
            made = {"model": "SmolLM2-135M", **dataclasses.asdict(recipe), "step": index, "rows": options.rows}
            path = options.out / file_name(recipe, index)
            kept = step if options.rows is None else cut(step, options.rows)
            save(path, kept, made | {"changed_percent": round(100 * share, 4)}, options.start)
            print(f"wrote {path}", flush=True)

    run(recipe, max(options.keep) + 1, options.compute, keep)


if __name__ == "__main__":
    main()
