"""How the context codec's time, memory and bytes grow with the model and with what changed: a table and a plot.

Run: python benchmarks/scaling.py --out benchmarks/scaling

A model at a time, where memory is short: --models 8B --densities --only ours --add, which keeps the file's other rows.
XOR holds 2 bytes of every element, the codec what changed.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterator
from functools import partial
from math import nan
from pathlib import Path

import numpy as np
from traces import TracedChange
from whole_layouts import CONTEXT, WHOLE, Step, cost
from wire_layouts import machine

CODERS = {"ours": CONTEXT, "xor": "XOR of whole tensors, zstd-1"}
COSTS = ("bytes", "encode_s", "encode_peak", "decode_s", "decode_peak")
FIELDS = ("sweep", "model", "elements", "changed", *(f"{who}_{what}" for who in CODERS for what in COSTS))
# hidden, intermediate, key-value width, layers, vocabulary: SmolLM2-135M, Qwen3-0.6B and 1.7B, Llama-3.1-8B
MODELS = {
    "135M": (576, 1536, 192, 30, 49152),
    "0.6B": (1024, 3072, 1024, 28, 151936),
    "1.7B": (2048, 6144, 1024, 28, 151936),
    "8B": (4096, 14336, 1024, 32, 128256),
}
DENSITIES = (1e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0)
_LARGEST = 2**27  # elements of a tensor that is made at once
TYPICAL = 6e-3  # of a step at lr 3e-6


def pair(shape: tuple[int, int], density: float, seed: int) -> TracedChange:
    """Weights like a trained tensor's and what a step makes of them: all move by about as much, few bits change."""
    rng = np.random.default_rng(seed)
    old = rng.standard_normal(shape[0] * shape[1], dtype=np.float32) * np.float32(0.02)
    moves = rng.standard_normal(old.size, dtype=np.float32)
    if density == 1:
        bits = rounded(old)
        return TracedChange(str(seed), shape, bits, bits + np.where(moves < 0, -1, 1).astype(np.uint16))
    part = slice(0, 2**18)
    low, high = 1e-9, 1.0  # the size of moves that changes such a share of bits
    for _ in range(30):
        scale = np.float32((low * high) ** 0.5)
        share = (rounded(old[part]) != rounded(old[part] + scale * moves[part])).mean()
        low, high = (scale, high) if share < density else (low, scale)
    moves *= scale
    moves += old
    return TracedChange(str(seed), shape, rounded(old), rounded(moves))


def rounded(values: np.ndarray) -> np.ndarray:
    """float32 to the bits of the nearest bfloat16."""
    return ((values.view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)


def model(name: str, density: float) -> Step:
    """A model's tensors: some layers made, and named again for the others, so that memory stays small.

    As many are made as no coder can see past: more than a million changes lie between a layer and its double.
    """
    hidden, inner, narrow, layers, words = MODELS[name]
    shapes = [(hidden, hidden), (narrow, hidden), (narrow, hidden), (hidden, hidden), *[(inner, hidden)] * 3]
    size = sum(rows * columns for rows, columns in shapes)
    made = min(layers, int(2**20 / (size * density)) + 1)
    kinds = [[pair(shape, density, 100 * k + i) for i, shape in enumerate(shapes)] for k in range(made)]
    parts = -(-words * hidden // _LARGEST)
    table = pair((words // parts, hidden), density, -1 % 2**32)
    step = [TracedChange(f"table.{k}", table.shape, table.old, table.new) for k in range(parts)]
    return step + [
        TracedChange(f"{k}.{i}", c.shape, c.old, c.new) for k in range(layers) for i, c in enumerate(kinds[k % made])
    ]


def figures(step: Step, repeats: int, coders: list[str]) -> dict[str, float]:
    """Seconds, bytes and peak memory of some of ``CODERS``."""
    found: dict[str, float] = {"elements": sum(c.old.size for c in step)}
    found["changed"] = sum(int((c.old != c.new).sum()) for c in step)
    for label in coders:
        encode, decode = WHOLE[CODERS[label]]
        data = encode(step)
        found[f"{label}_bytes"] = sum(map(len, data))
        found[f"{label}_encode_s"], found[f"{label}_encode_peak"] = cost(partial(encode, step), repeats)
        found[f"{label}_decode_s"], found[f"{label}_decode_peak"] = cost(partial(decode, data, step), repeats)
    return found


def sweep(options: argparse.Namespace) -> Iterator[dict[str, object]]:
    for name in options.models:
        yield {"sweep": "size", "model": name, **figures(model(name, TYPICAL), options.repeats, options.only)}
    for density in options.densities:
        step = [pair((2048, 2048), density, 0)]
        yield {"sweep": "density", "model": f"{density:g}", **figures(step, options.repeats, options.only)}


def merged(path: Path, new: list[dict[str, object]]) -> list[dict[str, object]]:
    """An earlier file's rows and ``new`` ones, which replace those of the same model or density."""
    rows = {}
    with path.open(newline="") as file:
        for row in csv.DictReader(file):
            figures = {key: (float if key.endswith("_s") else int)(row[key]) for key in FIELDS[2:] if row[key]}
            rows[row["sweep"], row["model"]] = {"sweep": row["sweep"], "model": row["model"], **figures}
    rows |= {(row["sweep"], row["model"]): row for row in new}
    return sorted(rows.values(), key=lambda row: (row["sweep"] != "size", row["elements"], row["changed"]))


def plot(rows: list[dict[str, object]], path: Path) -> None:
    """Four panels: time and memory, by size and by density."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 7))
    kinds = (("size", "elements", "model, by its elements"), ("density", "share", "share of elements that change"))
    for column, (kind, key, label) in enumerate(kinds):
        mine = [row | {"share": row["changed"] / row["elements"]} for row in rows if row["sweep"] == kind]
        x = [row[key] for row in mine]
        for who, style in (("ours", "o-"), ("xor", "s--")):
            for what in ("encode", "decode"):
                y = [row.get(f"{who}_{what}_s", nan) for row in mine]
                panels[0, column].plot(x, y, style, label=f"{who} {what}", alpha=0.8)
                y = [row.get(f"{who}_{what}_peak", nan) / 1e6 for row in mine]
                panels[1, column].plot(x, y, style, label=f"{who} {what}", alpha=0.8)
        for panel, unit in zip(panels[:, column], ("CPU seconds, one core", "peak MB beyond the weights"), strict=True):
            panel.set(xscale="log", yscale="log", xlabel=label, ylabel=unit)
            panel.grid(alpha=0.3)
            if kind == "size":
                panel.minorticks_off()
                panel.set_xticks(x, [row["model"] for row in mine])
    panels[0, 0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--densities", nargs="*", type=float, default=DENSITIES)
    parser.add_argument("--only", nargs="+", default=list(CODERS), choices=CODERS)
    parser.add_argument("--add", action="store_true", help="to the rows that --out's .csv has")
    parser.add_argument("--out", type=Path, required=True, help="path without ending, of a .csv and a .svg")
    options = parser.parse_args()
    print(machine())
    rows = []
    for row in sweep(options):
        rows.append(row)
        print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
    if options.add:
        rows = merged(options.out.with_suffix(".csv"), rows)
    with options.out.with_suffix(".csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator="\n")
        writer.writeheader()
        writer.writerows({k: round(v, 5) if isinstance(v, float) else v for k, v in row.items()} for row in rows)
    plot(rows, options.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
