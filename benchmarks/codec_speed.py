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
import zstandard
from layouts import LAYOUTS, Layout, changed_elements
from traces import TracedChange, load
from wire_layouts import machine

from delta_sync import DTYPES, DeltaHeader
from delta_sync.context_codec import context_field
from delta_sync.context_file import Change, decode_against, encode_against
from delta_sync.context_model import CONTEXTS, entropy_bits

BF16 = DTYPES["BF16"]
Step = Sequence[TracedChange]


def xor_encode(step: Step) -> list[bytes]:
    """XOR of whole tensors, zstd-1 each."""
    coder = zstandard.ZstdCompressor(level=1)
    return [coder.compress(np.bitwise_xor(c.old, c.new)) for c in step]


def xor_decode(data: list[bytes], step: Step) -> list[np.ndarray]:
    coder = zstandard.ZstdDecompressor()
    return [
        np.bitwise_xor(np.frombuffer(coder.decompress(f), np.uint16), c.old) for f, c in zip(data, step, strict=True)
    ]


def context_encode(step: Step) -> bytes:
    changes = [Change(c.name, BF16, c.shape, c.old, c.new) for c in step]
    return encode_against(DeltaHeader("benchmark", 2, 1, ""), changes)[1]


def context_decode(data: bytes, step: Step) -> list[np.ndarray]:
    old = {c.name: c.old for c in step}
    return [d.positions for d in decode_against(data, lambda name, dtype, shape: old[name])[1]]


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


def peer(layout: Layout, step: Step, repeats: int) -> tuple[int, float, float]:
    """Size, and seconds from weights to bytes and from bytes to positions and new bits."""

    def encode() -> bytes:
        return layout.encode([changed_elements(c.name, c.shape, c.old, c.new) for c in step])

    changes, data = [changed_elements(c.name, c.shape, c.old, c.new) for c in step], encode()
    return len(data), median_seconds(encode, repeats), median_seconds(lambda: layout.decode(data, changes), repeats)


def measure(step: Step, repeats: int) -> dict[str, object]:
    """All layouts over the same step."""
    dense = 2 * sum(c.old.size for c in step)
    changed = sum(int((c.old != c.new).sum()) for c in step)
    figures = {layout.name: peer(layout, step, repeats) for layout in LAYOUTS}
    xor, data = xor_encode(step), context_encode(step)
    check(data, step)
    figures["XOR of whole tensors, zstd-1"] = (
        sum(map(len, xor)),
        median_seconds(lambda: xor_encode(step), repeats),
        median_seconds(lambda: xor_decode(xor, step), repeats),
    )
    figures["ours: context8-ulp8-zstd"] = (
        len(data),
        median_seconds(lambda: context_encode(step), repeats),
        median_seconds(lambda: context_decode(data, step), repeats),
    )
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
    ratio = len(data) / changed / bounds["given_old_exponent"]
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
