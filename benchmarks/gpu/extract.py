"""What finding and bringing out a step's changes costs on a GPU, beside reading master and snapshot once.

Usage: python benchmarks/gpu/extract.py [--shape qwen3-0.6b] [--shape qwen3-8b] [--density 0.01] [--buckets 3] [--sweep]

Random weights in a real model's shapes, of which a random share moves by one ULP. Floors are measured in the same run:
one read of master and snapshot at the best reading speed of the card, the copy of the changes (10 bytes each: int64
position, 2 bytes of step) out at the bus's speed, and, where the snapshot is in host memory, its copy in. "host loop"
is what runs without the kernels: cast on the GPU, copy all of it out, compare on one core. Milliseconds, medians.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from commit_gap import SHAPES  # noqa: E402
from stage_interference import tensors_of  # noqa: E402

from delta_sync.delta import diff  # noqa: E402
from delta_sync.dtypes import dtype  # noqa: E402
from trl_callback import extract_pipeline  # noqa: E402
from trl_callback.extract import BUCKET_BYTES, Pair, torch_extract  # noqa: E402
from trl_callback.extract_pipeline import Pipeline  # noqa: E402
from trl_callback.pinned import pinned_copy  # noqa: E402

DEVICE = torch.device("cuda", 0)
BF16 = dtype("BF16")
MASTERS = {"fp32": torch.float32, "bf16": torch.bfloat16}
HEAD = ("shape", "master", "snapshot on", "bucket MiB", "at once", "changed", "extract", "of it tables", "read floor",
        "times floor", "out floor", "in floor", "torch ops", "host loop", "peak MiB beside the model")  # fmt: skip


def timed(work: Callable[..., Any], *given: Any, times: int = 5) -> float:
    """Median wall milliseconds of ``work(*given)``, the GPU idle before and after, after one call that warms up."""
    spans = []
    for turn in range(times + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work(*given)
        torch.cuda.synchronize()
        if turn:
            spans.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(spans)


def floors() -> dict[str, float]:
    """Bytes a millisecond: read on the device (the better of a copy and a sum), host to device, device to host."""
    there = torch.zeros(2**32, dtype=torch.uint8, device=DEVICE)
    twin = torch.empty_like(there)
    read = max(
        2 * there.numel() / timed(lambda: twin.copy_(there)),
        there.numel() / timed(lambda: there.view(torch.int32).sum()),
    )
    here = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    part = there[: here.numel()]
    into = here.numel() / timed(lambda: part.copy_(here, non_blocking=True))
    out = here.numel() / timed(lambda: here.copy_(part, non_blocking=True))
    return {"read": read, "in": into, "out": out}


def model(shape: str, master: str, density: float) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Master weights, and the bits they had before a random share of them moved, both on the device."""
    torch.manual_seed(0)
    live, held = {}, {}
    for name, size in tensors_of(SHAPES[shape]).items():
        weights = torch.randn(size, device=DEVICE, dtype=MASTERS[master]).reshape(-1)
        held[name] = weights.to(torch.bfloat16).view(torch.int16).clone()
        bits = weights.view(torch.int32 if master == "fp32" else torch.int16)
        for part in bits.split(2**26):
            part += (torch.rand(part.shape, device=DEVICE) < density).to(part.dtype) * (
                65536 if master == "fp32" else 1
            )
        live[name] = weights
    return live, held


def pairs(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> Iterator[Pair]:
    """As a snapshot gives them."""
    for name, weights in live.items():
        yield Pair(name, name, BF16, (weights.numel(),), weights, held[name])


def by_the_host(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The path of a trainer without the kernels."""
    found = {}
    for name, weights in live.items():
        new = weights.to(torch.bfloat16).cpu().view(torch.int16).numpy().view(np.uint16)
        found[name] = diff(name, BF16, (new.size,), held[name].numpy().view(np.uint16), new)
    return found


def by_torch(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    """The fallback."""
    torch_extract(pairs(live, held))


def run(pipeline: Pipeline, live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> None:
    """One capture."""
    pipeline(pairs(live, held))


def check(pipeline: Pipeline, live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor]) -> int:
    """That kernels and PyTorch's operations find the same; how many elements changed."""
    got, wanted = pipeline(pairs(live, held)), torch_extract(pairs(live, held))
    same = list(got) == list(wanted) and all(
        np.array_equal(got[k].positions, wanted[k].positions) and np.array_equal(got[k].values, wanted[k].values)
        for k in wanted
    )
    if not same:
        raise SystemExit("the kernels find other changes than PyTorch's operations")
    return sum(delta.changed for delta in got.values())


def rows(
    shape: str, master: str, density: float, speed: Mapping[str, float], sizes: list[int], at_once: list[int]
) -> Iterator[list[str]]:
    """One line of the table for each place of the snapshot, size of a bucket and how many are there at once."""
    live, on_device = model(shape, master, density)
    weights, bits = (sum(t.nbytes for t in some.values()) for some in (live, on_device))
    read = (weights + bits) / speed["read"]
    for where in ("cuda", "cpu"):
        held = on_device if where == "cuda" else {n: host_copy(t) for n, t in on_device.items()}
        host = timed(by_the_host, live, held, times=1) if where == "cpu" else None
        for bucket, extract_pipeline.BUCKETS in itertools.product(sizes, at_once):
            pipeline = Pipeline(DEVICE, bucket)
            changed = check(pipeline, live, held)
            launching = timed(launches, live, held, bucket)
            ops = (
                timed(by_torch, live, held, times=1)
                if (bucket, extract_pipeline.BUCKETS) == (sizes[0], at_once[0])
                else None
            )
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            spent = timed(run, pipeline, live, held)
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            yield [
                shape, master, where, f"{bucket / 2**20:.0f}", str(extract_pipeline.BUCKETS), f"{changed:,}",
                f"{spent:.1f}", f"{launching:.1f}",
                f"{read:.1f}", f"{spent / read:.2f}", f"{changed * 10 / speed['out']:.1f}",
                "-" if where == "cuda" else f"{bits / speed['in']:.1f}", "-" if ops is None else f"{ops:.0f}",
                "-" if host is None else f"{host:,.0f}", f"{peak:.0f}",
            ]  # fmt: skip


def launches(live: Mapping[str, torch.Tensor], held: Mapping[str, torch.Tensor], bucket: int) -> None:
    """Only the Python of cutting buckets and making tables: what no kernel can hide."""
    capture = extract_pipeline._Capture(DEVICE, bucket // extract_pipeline.BUCKETS, {}, {})
    for cut in capture._buckets(pairs(live, held)):
        cut.table([0] * len(cut.pairs))


def host_copy(bits: torch.Tensor) -> torch.Tensor:
    """In pinned memory, as a snapshot is."""
    return torch.from_numpy(pinned_copy(bits.cpu().numpy()))


def sweep(shape: str, master: str, density: float) -> None:
    """Other sizes of the kernels' blocks, with the snapshot on the device; prints milliseconds."""
    live, held = model(shape, master, density)
    print("\nblock, warps, bucket MiB: ms")
    for block, warps, size in itertools.product((512, 1024, 2048, 4096), (4, 8), (512, 2048)):
        extract_pipeline.BLOCK, extract_pipeline.WARPS = block, warps
        pipeline = Pipeline(DEVICE, size * 2**20)
        print(f"{block}, {warps}, {size}: {timed(run, pipeline, live, held):.1f}", flush=True)


def main() -> None:
    """Every shape and master, as one Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--density", type=float, default=0.01)
    parser.add_argument("--buckets", type=int, action="append", help="how many on the device at once")
    parser.add_argument("--sweep", action="store_true")
    args = parser.parse_args()
    speed = floors()
    print(torch.cuda.get_device_name(), {k: f"{v / 1e6:.0f} GB/s" for k, v in speed.items()}, f"{args.density:.2%}\n")
    print("|", " | ".join(HEAD), "|\n|" + "---|" * len(HEAD), flush=True)
    shapes, at_once = args.shape or ["qwen3-0.6b", "qwen3-8b"], args.buckets or [extract_pipeline.BUCKETS]
    for shape, master in itertools.product(shapes, MASTERS):
        for row in rows(shape, master, args.density, speed, [BUCKET_BYTES, 4 * BUCKET_BYTES], at_once):
            print("|", " | ".join(row), "|", flush=True)
        torch.cuda.empty_cache()
    if args.sweep:
        for master in MASTERS:
            sweep((args.shape or ["qwen3-8b"])[-1], master, args.density)


if __name__ == "__main__":
    main()
