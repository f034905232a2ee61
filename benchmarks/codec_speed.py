"""From old and new weights to bytes and back, in our codecs and the peers', beside the conditional entropy.

Run: python benchmarks/codec_speed.py --trace tests/traces/*policy*.npz
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import numpy as np
from traces import load
from whole_layouts import BF16, CONTEXT, WHOLE, GapValue16, Step, Way, cost, way_of, xet_bytes
from wire_layouts import machine

from delta_sync.context_codec import context_field
from delta_sync.context_file import decode_against
from delta_sync.context_model import CONTEXTS, entropy_bits
from delta_sync.peer_layouts import LAYOUTS, changed_elements

RAW, XOR = "raw safetensors", "XOR of whole tensors, zstd-1"


def entropy(step: Step) -> dict[str, float]:
    """Bytes a changed element of an ideal code that knows the old exponent: positions, step sizes, signs."""
    changes, sizes = np.zeros((CONTEXTS, 2), np.int64), np.zeros((CONTEXTS, 65536), np.int64)
    shift, mask = context_field(BF16)
    for c in step:
        contexts = (c.old >> shift & mask).astype(np.int64)
        found = changed_elements(c.name, c.shape, c.old, c.new).delta
        at = contexts[found.positions]
        changed = np.bincount(at, minlength=CONTEXTS)
        changes += np.stack([np.bincount(contexts, minlength=CONTEXTS) - changed, changed], axis=1)
        steps = found.values.astype(np.int16).astype(np.int64)
        np.add.at(sizes, (at, np.minimum(np.abs(steps), 65535)), 1)
    total = int(changes[:, 1].sum())
    parts = {"positions": entropy_bits(changes), "sizes": entropy_bits(sizes), "signs": float(total)}
    uniform = entropy_bits(changes.sum(axis=0, keepdims=True)) + entropy_bits(sizes.sum(axis=0, keepdims=True)) + total
    given = {name: bits / 8 / total for name, bits in parts.items()}
    return {**given, "given_old_exponent": sum(given.values()), "uniform": uniform / 8 / total}


def check(data: bytes, step: Step) -> None:
    old = {c.name: c.old for c in step}
    deltas = {d.name: d for d in decode_against(data, lambda name, dtype, shape: old[name])[1]}
    for c in step:
        found, got = changed_elements(c.name, c.shape, c.old, c.new).delta, deltas[c.name]
        if not (np.array_equal(found.positions, got.positions) and np.array_equal(found.values, got.values)):
            sys.exit(f"the context codec does not restore {c.name}")


def ways() -> dict[str, Way]:
    """All layouts, the peers' first."""
    first, *others = (layout for layout in LAYOUTS if layout.name not in WHOLE)
    named = [(layout.name, way_of(layout)) for layout in (first, GapValue16(), *others)]
    return {RAW: WHOLE[RAW], XOR: WHOLE[XOR], **dict(named), CONTEXT: WHOLE[CONTEXT]}


def row(name: str, way: Way, step: Step, repeats: int) -> dict[str, object]:
    """Size, speed and memory of one layout."""
    encode, decode = way
    data = encode(step)
    coding, coding_peak = cost(lambda: encode(step), repeats)
    reading, reading_peak = cost(lambda: decode(data, step), repeats)
    dense = 2 * sum(c.old.size for c in step)
    return {
        "layout": name,
        "bytes": sum(map(len, data)),
        "encode_gb_s": round(dense / coding / 1e9, 3),
        "decode_gb_s": round(dense / reading / 1e9, 3),
        "encode_peak_mb": round(coding_peak / 1e6, 2),
        "decode_peak_mb": round(reading_peak / 1e6, 2),
    }


def measure(step: Step, repeats: int, xet: bool = False) -> dict[str, object]:
    """All layouts over the same step."""
    elements = sum(c.old.size for c in step)
    changed = sum(int((c.old != c.new).sum()) for c in step)
    check(WHOLE[CONTEXT][0](step)[0], step)
    rows = [row(name, way, step, repeats) for name, way in ways().items()]
    if xet:
        rows.insert(1, {"layout": "Xet re-upload of the checkpoint", "bytes": xet_bytes(step)})
    bounds = entropy(step)
    for entry in rows:
        entry["bytes_per_changed"] = round(entry["bytes"] / changed, 4)
        entry["over_entropy"] = round(entry["bytes_per_changed"] / bounds["given_old_exponent"], 3)
    ours, xor = rows[-1], next(entry for entry in rows if entry["layout"] == XOR)
    return {
        "changed_percent": round(100 * changed / elements, 4),
        "layouts": rows,
        "entropy": bounds,
        "over_entropy": ours["over_entropy"],
        "encode_over_xor": round(ours["encode_gb_s"] / xor["encode_gb_s"], 2),
        "decode_over_xor": round(ours["decode_gb_s"] / xor["decode_gb_s"], 2),
    }


def print_table(result: dict[str, object]) -> None:
    keys = ("bytes_per_changed", "over_entropy", "encode_gb_s", "decode_gb_s", "encode_peak_mb", "decode_peak_mb")
    heads = ("B/changed", "/entropy", "enc GB/s", "dec GB/s", "enc MB", "dec MB")
    print(f"{'layout':<42}" + "".join(f"{head:>11}" for head in heads))
    for entry in result["layouts"]:
        print(f"{entry['layout']:<42}" + "".join(f"{entry.get(key, ''):>11}" for key in keys))
    print("entropy, B/changed: " + ", ".join(f"{k} {v:.3f}" for k, v in result["entropy"].items()))
    print(f"context codec over XOR: encode {result['encode_over_xor']}, decode {result['decode_over_xor']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path, nargs="+", required=True, help="files that traces.py wrote")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--xet", action="store_true", help="also what a Xet client uploads, by the tests' own Hub")
    options = parser.parse_args()
    here = machine()
    print(f"{here['cpu']}, {here['cores']} cores; one thread's CPU time, median of {options.repeats}.")
    for path in options.trace:
        step, made = load(path)
        result = measure(step, options.repeats, options.xet)
        print(f"\n{path.stem}: {made}\n{result['changed_percent']} % changed")
        print_table(result)
        print(json.dumps({"benchmark": "codec_speed", "machine": here, "made": made, **result}))


if __name__ == "__main__":
    main()
