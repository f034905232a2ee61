"""From old and new weights to bytes and back, in our codecs and the peers', beside the conditional entropy.

Run: python benchmarks/codec_speed.py --trace /tmp/traces/lr3e-06-float32-policy-step20.npz
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from traces import TracedChange, load
from wire_layouts import machine

from delta_sync import DTYPES
from delta_sync.context_model import CONTEXTS, entropy_bits
from delta_sync.context_scan import contexts_of
from delta_sync.peer_layouts import LAYOUTS, Changed, Layout, changed_elements

BF16 = DTYPES["BF16"]
Step = Sequence[TracedChange]


def found(step: Step) -> list[Changed]:
    return [changed_elements(c.name, c.shape, c.old, c.new) for c in step]


def median_seconds(run: Callable[[], object], repeats: int) -> float:
    """CPU seconds of this thread, median of ``repeats``; one run before them compiles and warms up."""
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return statistics.median(times)


def entropy(step: Step) -> dict[str, float]:
    """Bytes a changed element of an ideal code that knows the old exponent: positions, step sizes, signs."""
    changes, sizes = np.zeros((CONTEXTS, 2), np.int64), np.zeros((CONTEXTS, 65536), np.int64)
    for c in step:
        contexts = contexts_of(c.old, BF16).astype(np.int64)
        delta = changed_elements(c.name, c.shape, c.old, c.new).delta
        at = contexts[delta.positions]
        changed = np.bincount(at, minlength=CONTEXTS)
        changes += np.stack([np.bincount(contexts, minlength=CONTEXTS) - changed, changed], axis=1)
        steps = delta.values.astype(np.int16).astype(np.int64)
        np.add.at(sizes, (at, np.minimum(np.abs(steps), 65535)), 1)
    total = int(changes[:, 1].sum())
    parts = {"positions": entropy_bits(changes), "sizes": entropy_bits(sizes), "signs": float(total)}
    uniform = entropy_bits(changes.sum(axis=0, keepdims=True)) + entropy_bits(sizes.sum(axis=0, keepdims=True)) + total
    given = {name: bits / 8 / total for name, bits in parts.items()}
    return {**given, "given_old_exponent": sum(given.values()), "uniform": uniform / 8 / total}


def check(layout: Layout, data: bytes, changes: Sequence[Changed]) -> None:
    for c, (positions, bits) in zip(changes, layout.decode(data, changes), strict=True):
        if not (np.array_equal(positions, c.positions) and np.array_equal(bits, c.new)):
            sys.exit(f"{layout.name} does not restore {c.name}")


def figures_of(layout: Layout, step: Step, repeats: int) -> tuple[int, float, float]:
    """Size, and seconds from weights to bytes and from bytes to what the layout restores."""
    changes = found(step)

    def encode() -> bytes:
        return layout.encode(changes if layout.finds else found(step))

    data = encode()
    check(layout, data, changes)
    return len(data), median_seconds(encode, repeats), median_seconds(lambda: layout.decode(data, changes), repeats)


def measure(step: Step, repeats: int) -> dict[str, object]:
    """All layouts over the same step."""
    dense = 2 * sum(c.old.size for c in step)
    changed = sum(int((c.old != c.new).sum()) for c in step)
    figures = {layout.name: figures_of(layout, step, repeats) for layout in LAYOUTS}
    rows = [
        {
            "layout": name,
            "bytes_per_changed": round(size / changed, 4),
            "encode_gb_s": round(dense / encode / 1e9, 2),
            "decode_gb_s": round(dense / decode / 1e9, 2),
        }
        for name, (size, encode, decode) in figures.items()
    ]
    bounds = entropy(step)
    ratio = figures[LAYOUTS[-1].name][0] / changed / bounds["given_old_exponent"]
    share = round(200 * changed / dense, 4)
    return {"changed_percent": share, "layouts": rows, "entropy": bounds, "over_entropy": round(ratio, 4)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="files that traces.py wrote")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores; one thread's CPU time, median of {options.repeats}.")
    for path in options.trace:
        step, made = load(path)
        result = measure(step, options.repeats)
        print(f"\n{made}\n{result['changed_percent']} % changed")
        print(f"{'layout':<42} {'B/changed':>9} {'encode GB/s':>12} {'decode GB/s':>12}")
        for row in result["layouts"]:
            speeds = f"{row['encode_gb_s']:>12} {row['decode_gb_s']:>12}"
            print(f"{row['layout']:<42} {row['bytes_per_changed']:>9.3f} {speeds}")
        print("entropy, B/changed: " + ", ".join(f"{k} {v:.3f}" for k, v in result["entropy"].items()))
        print(f"context codec over entropy given the old exponent: {result['over_entropy']}")
        print(json.dumps({"benchmark": "codec_speed", "machine": here, "made": made, **result}))


if __name__ == "__main__":
    main()
