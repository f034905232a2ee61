"""Bytes a changed element on real training deltas, in our layout and the peers', on the same tensors.

Run: python benchmarks/wire_layouts.py --lr 3e-6 --steps 24
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from delta_sync.peer_layouts import LAYOUTS, Changed, Layout, changed_elements

if TYPE_CHECKING:
    from real_deltas import Change

REPEATS = 3


def machine() -> dict[str, object]:
    """CPU model and core count, as figures are worth nothing without."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return {"cpu": model or platform.processor() or platform.machine(), "cores": os.cpu_count()}


def fastest(run: Callable[[], object]) -> float:
    """Seconds of the best of a few runs; one before them compiles and warms up."""
    run()
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def measure(layout: Layout, changes: Sequence[Changed], dense: int) -> dict[str, object]:
    """Size and speed of one layout; exits unless it restores every position and bit. ``dense``: bytes of the model."""
    data = layout.encode(changes)
    for c, (positions, bits) in zip(changes, layout.decode(data, changes), strict=True):
        if not (np.array_equal(positions, c.positions) and np.array_equal(bits, c.new)):
            sys.exit(f"{layout.name} does not restore {c.name}")
    changed = sum(c.positions.size for c in changes)
    return {
        "layout": layout.name,
        "bytes": len(data),
        "bytes_per_changed": round(len(data) / changed, 4),
        "encode_gb_s": round(dense / fastest(lambda: layout.encode(changes)) / 1e9, 2),
        "decode_gb_s": round(dense / fastest(lambda: layout.decode(data, changes)) / 1e9, 2),
    }


def compare(changes: Sequence[Changed], elements: int) -> dict[str, object]:
    """All layouts over the same changes of a model of ``elements`` bfloat16 elements."""
    changes = [c for c in changes if c.positions.size]
    changed = sum(c.positions.size for c in changes)
    rows = [measure(layout, changes, 2 * elements) for layout in LAYOUTS]
    rows.append({"layout": "raw: every element", "bytes": 2 * elements, "bytes_per_changed": 2 * elements / changed})
    sizes = {row["layout"].split(":")[0]: row["bytes_per_changed"] for row in rows if "context" not in row["layout"]}
    trl, ours = sizes["TRL"], sizes["ours"]
    return {
        "elements": elements,
        "changed": changed,
        "changed_percent": round(100 * changed / elements, 4),
        "ours_over_trl": round(ours / trl, 4),
        "layouts": rows,
    }


def print_table(result: dict[str, object]) -> None:
    print(f"\n{'layout':<42} {'B/changed':>9} {'of TRL':>7} {'MB':>8} {'encode GB/s':>12} {'decode GB/s':>12}")
    trl = result["layouts"][0]["bytes"]
    for row in result["layouts"]:
        speeds = " ".join(f"{row.get(key, ''):>12}" for key in ("encode_gb_s", "decode_gb_s"))
        size = f"{row['bytes_per_changed']:>9.3f} {row['bytes'] / trl:>7.3f} {row['bytes'] / 1e6:>8.3f}"
        print(f"{row['layout']:<42} {size} {speeds}")


def last_step(lr: float, steps: int, compute: str) -> tuple[list[Change], str]:
    """Train SmolLM2-135M; what the last step changed, and the compute type."""
    import real_deltas  # torch and transformers are for this alone

    kind = real_deltas.compute_type(compute)
    print(f"training SmolLM2-135M: lr {lr}, {steps} steps, {kind} compute, float32 masters", flush=True)
    step: list[Change] = []
    for index, step in enumerate(real_deltas.train(*real_deltas.load_model(), real_deltas.Recipe(lr), steps, kind)):
        changed = sum(int((c.old != c.new).sum()) for c in step)
        print(f"step {index:>3}: {changed / sum(c.old.size for c in step):.3%} changed", flush=True)
    return step, str(kind).removeprefix("torch.")


def found(step: Sequence[Change]) -> list[Changed]:
    """The changed elements of each tensor."""
    return [changed_elements(c.name, c.shape, c.old, c.new) for c in step]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lr", type=float, default=3e-6)
    parser.add_argument("--steps", type=int, default=24, help="optimizer steps; the last one is measured")
    parser.add_argument("--compute", choices=("auto", "bfloat16", "float32"), default="auto")
    options = parser.parse_args()
    if options.steps < 1:
        parser.error("--steps must be at least 1")
    step, compute = last_step(options.lr, options.steps, options.compute)
    elements = sum(c.old.size for c in step)
    speed = 2 * elements / fastest(lambda: found(step))
    result = compare(found(step), elements)
    here = machine()
    print(f"\n{here['cpu']}, {here['cores']} cores; codecs use one. GB/s are of dense bfloat16 weights.")
    print(
        f"step {options.steps - 1}: {result['changed']} of {elements} elements changed ({result['changed_percent']} %)"
    )
    print(f"finding them (diff): {speed / 1e9:.2f} GB/s")
    print_table(result)
    run = {"lr": options.lr, "step": options.steps - 1, "compute": compute, "diff_gb_s": round(speed / 1e9, 2)}
    print(json.dumps({"benchmark": "wire_layouts", "machine": here, **run, **result}))


if __name__ == "__main__":
    main()
