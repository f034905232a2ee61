"""What the GPU's own work costs, without an engine: staging, committing, digesting, beside the card's copy bandwidth.

Usage: python benchmarks/gpu/kernel_times.py [--shape qwen3-0.6b] [--density 0.01]...

Random weights in a real model's shapes, random positions (no neighbours: the worst case for memory), one JSON object a
line. Floors: 64-byte granules touched are read and written once, and what is staged is read, at the bandwidth of a
large copy on the same card. Beside a commit: a kernel that only writes the same elements, vLLM's own sparse engine (if
vLLM is there and has one; without the transfer), a dense copy on the device, and the usual way through a snapshot in
host memory. Milliseconds, medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import numpy as np  # noqa: E402
import torch  # noqa: E402
from commit_gap import SHAPES  # noqa: E402
from stage_interference import tensors_of  # noqa: E402
from write_alone import write_alone  # noqa: E402

from delta_sync.dtypes import dtype  # noqa: E402
from delta_sync.tensor_delta import TensorDelta  # noqa: E402
from vllm_delta_plugin.commit import Cuda  # noqa: E402
from vllm_delta_plugin.coverage import TensorInfo, WeightMap  # noqa: E402
from vllm_delta_plugin.live_storage import live_storage  # noqa: E402
from vllm_delta_plugin.regions import make_region  # noqa: E402
from vllm_delta_plugin.rehearsal import rehearse  # noqa: E402

DEVICE = torch.device("cuda", 0)
GRANULE = 64  # bytes the memory moves at least


def model(shapes: dict[str, tuple[int, ...]]) -> WeightMap:
    """Random bfloat16 weights on the GPU, each tensor in a storage of its own."""
    torch.manual_seed(0)
    weights = WeightMap(known=frozenset(shapes))
    for number, (name, shape) in enumerate(shapes.items()):
        live = torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)
        weights.storages.append(live_storage(name, live))
        weights.tensors[name] = TensorInfo(dtype("BF16"), shape)
        weights.regions[name] = [make_region(name, number, (live.numel(),), 0, (1,), 0, (1,))]
    return weights


def deltas(weights: WeightMap, density: float) -> tuple[dict[str, list[TensorDelta]], int, int]:
    """A random delta of one or two steps; also how many elements it changes and how many granules they lie in."""
    found, changed, granules = {}, 0, 0
    for name, info in weights.tensors.items():
        size = weights.regions[name][0].numel
        at = torch.nonzero(torch.rand(size, device=DEVICE) < density)[:, 0]
        steps = torch.randint(1, 3, at.shape, device=DEVICE, dtype=torch.int16)
        granules += int(torch.unique_consecutive(at * 2 // GRANULE).numel())
        changed += at.numel()
        positions, values = at.cpu().numpy(), steps.cpu().numpy().view(np.uint16)
        found[name] = [TensorDelta(name, info.dtype, info.shape, "ulp", positions, values)]
    return found, changed, granules


def on_gpu(work: Callable[[], Any], times: int = 9) -> float:
    """Median GPU milliseconds of ``work`` on the current stream, after one call that warms up."""
    work()
    spans = []
    for _ in range(times):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(3_000_000)  # cycles: what is launched meanwhile waits, so that the host's time does not count
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        spans.append(begin.elapsed_time(end))
    return statistics.median(spans)


def wall(work: Callable[[], Any]) -> tuple[float, Any]:
    """Milliseconds of ``work``, the GPU's included, and its result."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    result = work()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - begin), result


def bandwidth() -> float:
    """Bytes read and written a millisecond by a copy of 4 GiB on the device."""
    a = torch.empty(2**32, dtype=torch.uint8, device=DEVICE)
    b = torch.empty_like(a)
    return 2 * a.numel() / on_gpu(lambda: b.copy_(a))


def blog(weights: WeightMap, delta: dict[str, list[TensorDelta]]) -> float:
    """The other way: scatter into a snapshot in host memory, copy every changed tensor to the device, dense."""
    snapshot = [storage.bits.cpu() for storage in weights.storages]
    order = {storage.owner: number for number, storage in enumerate(weights.storages)}

    def work() -> None:
        for name, [change] in delta.items():
            host = snapshot[order[name]]
            host[torch.from_numpy(change.positions)] = torch.from_numpy(change.values.view(np.int16))
            weights.storages[order[name]].bits.copy_(host)

    return wall(work)[0]


def sparse_engine(weights: WeightMap, delta: dict[str, list[TensorDelta]]) -> float | None:
    """vLLM's sparse weight transfer engine, as 0.26 has it: its patches, already on the device, applied."""
    try:
        from vllm.distributed.weight_transfer.sparse_nccl_engine import (
            SparseNCCLWeightTransferEngine,
            SparseWeightPatch,
        )
    except ImportError:
        return None
    if not hasattr(SparseNCCLWeightTransferEngine, "_apply_patch"):
        return None
    live = {storage.owner: storage.bits for storage in weights.storages}
    engine = SimpleNamespace(model=SimpleNamespace(get_parameter=lambda name: live[name]))
    patches = []
    for name, [change] in delta.items():
        at = torch.from_numpy(change.positions).to(DEVICE)
        patches.append(SparseWeightPatch(name=name, indices=at.to(torch.int32), values=live[name][at]))

    def work() -> None:
        for patch in patches:
            SparseNCCLWeightTransferEngine._apply_patch(engine, patch)

    return round(on_gpu(work), 3)


def measure(shape: str, density: float, speed: float, weights: WeightMap) -> dict[str, Any]:
    """One density on one model."""
    side = Cuda(DEVICE)
    delta, changed, granules = deltas(weights, density)
    rehearse(weights.storages[0], side)
    before = weights.digests()

    def stage() -> Any:
        builder = side.builder(weights, 2**62)
        with side.reading():
            builder.add_deltas(delta)
        return builder, side.prepare(builder)

    staging, (builder, swap) = wall(stage)
    commit = on_gpu(lambda: swap.swap(lambda: None), times=9)  # ten swaps in all: the bits are as they were
    host_begin = time.perf_counter()
    swap.swap(lambda: None)
    host = 1e3 * (time.perf_counter() - host_begin)
    after = weights.digests()
    proven = all((before[key] + builder.parts.get(key, 0)) % 2**64 == after[key] for key in before)
    swap.swap(lambda: None)
    undone = weights.digests() == before
    writing = on_gpu(lambda: [write_alone(part.addresses, part.staged) for part in builder.on_device])
    staged = changed * (8 + 2)  # addresses and staged bits read
    floor = (2 * granules * GRANULE + staged) / speed
    size = sum(storage.bits.nbytes for storage in weights.storages)
    dense = on_gpu(lambda: [storage.bits.clone() for storage in weights.storages])
    return {
        "shape": shape,
        "density": density,
        "changed": changed,
        "proven_and_undone": proven and undone,
        "stage_ms": round(staging, 2),
        "commit_gpu_ms": round(commit, 3),
        "commit_host_ms": round(host, 3),
        "commit_floor_ms": round(floor, 3),
        "commit_over_floor": round(commit / floor, 2),
        "dense_copy_on_device_ms": round(dense, 2),
        "commit_over_writing_alone": round(commit / writing, 2),
        "vllm_sparse_engine_ms": sparse_engine(weights, delta),
        "snapshot_scatter_and_dense_upload_ms": round(blog(weights, delta), 1),
        "weights_bytes": size,
    }


def scan(shape: str, speed: float, weights: WeightMap) -> dict[str, Any]:
    """The audit: every region's digest, beside one read of the weights."""
    size = sum(storage.bits.nbytes for storage in weights.storages)
    weights.digests()
    seconds = min(wall(weights.digests)[0] for _ in range(3))
    reading = on_gpu(lambda: [s.bits.view(torch.int32).max() for s in weights.storages])
    floor = size / speed
    return {
        "shape": shape,
        "full_scan_ms": round(seconds, 2),
        "read_floor_ms": round(floor, 2),
        "torch_max_of_the_weights_ms": round(reading, 2),
        "scan_over_read_floor": round(seconds / floor, 2),
    }


def main() -> None:
    """Every density, then the scan."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--density", type=float, action="append")
    args = parser.parse_args()
    speed = bandwidth()
    print(json.dumps({"card": torch.cuda.get_device_name(), "copy_TB_s": round(speed / 1e9, 3)}), flush=True)
    weights = model(tensors_of(SHAPES[args.shape]))
    for density in args.density or [0.001, 0.01, 0.1]:
        print(json.dumps(measure(args.shape, density, speed, weights)), flush=True)
        torch.cuda.empty_cache()
    print(json.dumps(scan(args.shape, speed, weights)), flush=True)


if __name__ == "__main__":
    main()
