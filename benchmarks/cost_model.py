"""What a version costs from 135M to 1T parameters and up to 100 replicas, checked against points measured here.

Usage: python benchmarks/cost_model.py [--measure] [--plot docs/cost.svg]

``--measure`` runs the product's own steps on weights of true shapes and keeps their CPU seconds (of the one thread they
run on, so that a busy machine does not count) in cost_points.json. Rates come from one of those points; the others, of
other sizes and densities, are predicted and printed beside what was measured. Then the table and the plot.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

import numpy as np  # noqa: E402
from shapes import SHAPES, tensors_of  # noqa: E402

from delta_sync.delta import apply, diff  # noqa: E402
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, decode_delta, encode_delta  # noqa: E402
from delta_sync.dtypes import dtype  # noqa: E402
from delta_sync.tensor_delta import TensorDelta  # noqa: E402

POINTS = Path(__file__).with_name("cost_points.json")
BF16 = dtype("BF16")
BUCKET = 512 * 1024**2  # of weights in one object
# The first two give the rates, the others are predicted.
MEASURED = [("smollm2-135m", 0.01), ("smollm2-135m", 0.05), ("smollm2-135m", 0.003), ("smollm2-135m", 0.02),
            ("qwen3-0.6b", 0.003), ("qwen3-0.6b", 0.01)]  # fmt: skip
PUBLISH_TRIPS, TAKE_TRIPS = 3, 3  # round trips in a row: object, fence, manifest; look, look past it, object
POLL = 0.1


@dataclass(frozen=True)
class Rates:
    """Elements or changes a second of one core (or one GPU), and bytes a change on the wire."""

    extract: float  # elements compared
    collect: float  # changes brought out of the comparison
    encode: float  # changes
    decode: float
    apply: float
    bytes: float


@dataclass(frozen=True)
class Fleet:
    """Who takes part: each trainer rank extracts, encodes and uploads its share; each replica machine fetches all."""

    parameters: float
    density: float = 0.01
    trainers: int = 1
    replicas: int = 1
    ranks: int = 1  # of one replica; each stages its share
    encoders: int = 4  # threads of a trainer rank that encode
    decoders: int = 4  # threads of a replica that decode
    up: float = 125e6  # bytes a second of a trainer's link
    down: float = 125e6  # of a replica machine's
    store_out: float = 12.5e9  # that the bucket gives to all together
    rtt: float = 0.05


def seconds(fleet: Fleet, rates: Rates, *, bytes_a_change: float | None = None) -> dict[str, float]:
    """Of each stage, and from the optimizer step until the last replica serves; stages of one side overlap."""
    changes = fleet.parameters * fleet.density
    wire = changes * (rates.bytes if bytes_a_change is None else bytes_a_change)
    parts = {
        "extract": (fleet.parameters / rates.extract + changes / rates.collect) / fleet.trainers,
        "encode": changes / fleet.trainers / rates.encode / fleet.encoders,
        "upload": wire / fleet.trainers / fleet.up,
        "fetch": wire / min(fleet.down, fleet.store_out / fleet.replicas),
        "decode": changes / rates.decode / fleet.decoders,
        "stage": changes / fleet.ranks / rates.apply,
    }
    publish = max(parts["extract"], parts["encode"], parts["upload"])
    take = max(parts["fetch"], parts["decode"], parts["stage"])
    waits = (PUBLISH_TRIPS + TAKE_TRIPS) * fleet.rtt + POLL
    return {**parts, "waits": waits, "total": publish + take + waits}


def blog_seconds(fleet: Fleet, rates: Rates, load: float) -> float:
    """The blog's protocol: the same comparison, 6 bytes a change, one after the other, and a dense load."""
    wire = fleet.parameters * fleet.density * 6
    dense = 2 * fleet.parameters / fleet.ranks / load
    return (
        fleet.parameters / fleet.trainers / rates.extract + wire / fleet.trainers / fleet.up
        + wire / min(fleet.down, fleet.store_out / fleet.replicas) + dense + 2.5 * fleet.rtt
    )  # fmt: skip


def full_seconds(fleet: Fleet) -> float:
    """All weights up and down every time."""
    wire = 2 * fleet.parameters
    return wire / fleet.trainers / fleet.up + wire / min(fleet.down, fleet.store_out / fleet.replicas) + 2 * fleet.rtt


def point(shape: str, density: float) -> dict[str, Any]:
    """CPU seconds of each step on one model, on one thread; objects as the trainer cuts them."""
    random = np.random.default_rng(0)
    spent = dict.fromkeys(("extract", "apply", "encode", "decode"), 0.0)
    header = DeltaHeader("run", 2, 1, DEFAULT_CODEC)
    objects: list[list[TensorDelta]] = [[]]
    elements = held = 0

    def timed(what: str, work: Callable[..., Any], *given: Any) -> Any:
        begin = time.thread_time()
        result = work(*given)
        spent[what] += time.thread_time() - begin
        return result

    for name, dims in tensors_of(SHAPES[shape]).items():
        count = int(np.prod(dims))
        old = random.integers(0, 2**16, count, np.uint16)
        new = old.copy()
        at = np.flatnonzero(random.random(count, np.float32) < density)
        new[at] += random.choice(np.array([1, 2**16 - 1], np.uint16), at.size)
        delta = timed("extract", diff, name, BF16, dims, old, new)
        timed("apply", apply, delta, old)
        elements += count
        if held + 2 * count > BUCKET and objects[-1]:
            objects.append([])
            held = 0
        if delta.changed:
            objects[-1].append(delta)
            held += 2 * count
    coded = [timed("encode", encode_delta, header, part) for part in objects]
    for data in coded:
        timed("decode", decode_delta, data)
    changes = sum(delta.changed for part in objects for delta in part)
    return {"shape": shape, "density": density, "elements": elements, "changes": changes,
            "bytes": sum(map(len, coded)), **spent}  # fmt: skip


def rates_of(points: list[dict[str, Any]]) -> Rates:
    """What two points of one model show, the second denser: comparing costs elements and changes, the rest changes."""
    one, two = points[:2]
    change = (two["extract"] - one["extract"]) / (two["changes"] - one["changes"])
    element = (one["extract"] - change * one["changes"]) / one["elements"]
    return Rates(1 / element, 1 / max(change, 1e-12), *(one["changes"] / one[k] for k in ("encode", "decode", "apply")),
                 one["bytes"] / one["changes"])  # fmt: skip


def check(points: list[dict[str, Any]]) -> list[str]:
    """Rows of predicted and measured CPU seconds; the first two points give the rates, and are left out."""
    rates = rates_of(points)
    rows = []
    for m in points[2:]:
        one = Fleet(m["elements"], m["changes"] / m["elements"], encoders=1, decoders=1)
        predicted = seconds(one, rates)
        told = [("extract", "extract"), ("encode", "encode"), ("decode", "decode"), ("stage", "apply")]
        cells = [f"{predicted[ours]:.3g} / {m[theirs]:.3g}" for ours, theirs in told]
        rows.append(f"| {m['shape']}, {m['density']:.1%} | " + " | ".join(cells)
                    + f" | {rates.bytes * m['changes']:,.0f} / {m['bytes']:,} |")  # fmt: skip
    return rows


# What one H200 and one trainer GPU do (docs/COST.md names the measurements), beside this machine's core for the codec.
GPU = {"extract": 8.19e9 / 0.0397, "collect": 5.5e9, "apply": 81.9e6 / 0.122}
LOAD = 8.0e9  # bytes a second of a dense load through the host: scatter into a snapshot and upload, 8B, H200
FLEETS = [
    ("0.6B, 1 replica, 1 Gbit/s", Fleet(0.596e9)),
    ("8B, 4 replicas, 1 Gbit/s", Fleet(8.19e9, replicas=4, trainers=1)),
    ("8B, 4 replicas, 10 Gbit/s", Fleet(8.19e9, replicas=4, up=1.25e9, down=1.25e9, decoders=16)),
    ("70B, 16 replicas, 10 Gbit/s", Fleet(70e9, trainers=8, replicas=16, ranks=4, up=1.25e9, down=1.25e9, decoders=16)),
    ("1T, 100 replicas, 10 Gbit/s",
     Fleet(1e12, trainers=64, replicas=100, ranks=16, up=1.25e9, down=1.25e9, decoders=32, store_out=125e9)),
    ("1T, 100 replicas, 100 Gbit/s",
     Fleet(1e12, trainers=64, replicas=100, ranks=16, up=12.5e9, down=12.5e9, decoders=32, store_out=1.25e12)),
]  # fmt: skip


def table(rates: Rates) -> list[str]:
    """Every fleet's seconds, ours stage by stage, beside the blog's protocol and full checkpoints."""
    rows = []
    for name, fleet in FLEETS:
        ours = seconds(fleet, rates)
        stages = ", ".join(
            f"{what} {ours[what]:.2g}" for what in ("extract", "encode", "upload", "fetch", "decode", "stage")
        )
        wire = fleet.parameters * fleet.density * rates.bytes
        rows.append(f"| {name} | {wire / 1e9:.3g} | {stages} | **{ours['total']:.2g}** | "
                    f"{blog_seconds(fleet, rates, LOAD):.2g} | {full_seconds(fleet):.2g} |")  # fmt: skip
    return rows


def plot(rates: Rates, target: Path) -> None:
    """Seconds against parameters, for one replica and a hundred."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cost"
    from matplotlib import pyplot

    sizes = np.geomspace(135e6, 1e12, 60)
    figure, axes = pyplot.subplots(figsize=(8, 5))
    for replicas, style in ((1, "-"), (100, "--")):
        fleets = [Fleet(p, replicas=replicas, trainers=max(1, int(p / 16e9)), ranks=max(1, int(p / 60e9)),
                        up=1.25e9, down=1.25e9, decoders=16) for p in sizes]  # fmt: skip
        many = f"{replicas} replica{'s' * (replicas > 1)}"
        axes.plot(sizes, [seconds(f, rates)["total"] for f in fleets], style, color="C0", label=f"ours, {many}")
        axes.plot(sizes, [blog_seconds(f, rates, LOAD) for f in fleets], style, color="C1", label=f"blog's, {many}")
        axes.plot(sizes, [full_seconds(f) for f in fleets], style, color="C3", label=f"full checkpoint, {many}")
    axes.set(xscale="log", yscale="log", xlabel="parameters", ylabel="seconds from step to last replica served",
             title="1 % changed, 10 Gbit/s a machine, bucket 100 Gbit/s, RTT 50 ms")  # fmt: skip
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    """Check, table, plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--plot", type=Path)
    args = parser.parse_args()
    if args.measure:
        point("tiny", 0.05)  # compiles
        POINTS.write_text(json.dumps([point(*what) for what in MEASURED], indent=1) + "\n")
    points = json.loads(POINTS.read_text())
    print(
        "predicted / measured, CPU seconds and bytes\n\n| point | extract | encode | decode | apply | bytes |\n"
        "|---|---|---|---|---|---|"
    )
    print("\n".join(check(points)))
    rates = replace(rates_of(points), **GPU)
    print("\nrates:", json.dumps({k: float(f"{v:.3g}") for k, v in asdict(rates).items()}))
    print(
        "\n| fleet | GB a version | stages, s | ours, s | blog's, s | full checkpoint, s |\n|---|---|---|---|---|---|"
    )
    print("\n".join(table(rates)))
    if args.plot:
        plot(rates, args.plot)


if __name__ == "__main__":
    main()
