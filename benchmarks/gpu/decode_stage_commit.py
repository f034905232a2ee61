"""A version's way from object bytes to live weights on a GPU, beside one dense read of the weights.

Usage: python benchmarks/gpu/decode_stage_commit.py [--shape qwen3-8b] [--density 0.01]

Random weights in a real model's shapes, random positions, objects as the trainer cuts them (512 MiB of weights each).
Objects are fetched from this process's memory, decoded on as many threads as the row says, staged on the GPU one by one
and committed by one swap. Floors: one read of all weights at the card's copy bandwidth, and what the entropy coder
alone takes (zstd on one core). Milliseconds, medians of five.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "benchmarks" / "gpu")]

import torch  # noqa: E402
from commit_gap import SHAPES  # noqa: E402
from kernel_times import DEVICE, bandwidth, deltas, model, on_gpu, wall  # noqa: E402
from stage_interference import tensors_of  # noqa: E402

from delta_sync import fetch as fetching  # noqa: E402
from delta_sync.container import read_container  # noqa: E402
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, Unpacked, decode_delta, encode_delta  # noqa: E402
from delta_sync.fetch import fetch  # noqa: E402
from delta_sync.frames import decompress  # noqa: E402
from delta_sync.limits import DEFAULT_LIMITS  # noqa: E402
from delta_sync.manifest import ObjectRef  # noqa: E402
from delta_sync.tensor_delta import TensorDelta  # noqa: E402
from delta_sync.threads import SETTING  # noqa: E402
from trl_callback.parts import Parts  # noqa: E402
from vllm_delta_plugin.commit import Cuda  # noqa: E402
from vllm_delta_plugin.coverage import WeightMap  # noqa: E402
from vllm_delta_plugin.rehearsal import rehearse  # noqa: E402

BUCKET = 512 * 1024**2


class Memory:
    """Objects that are here already."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def put(self, data: bytes) -> ObjectRef:
        """Keep one."""
        sha256 = hashlib.sha256(data).hexdigest()
        self.objects[sha256] = data
        return ObjectRef(sha256, len(data), sha256)

    def read_object(self, ref: ObjectRef) -> bytes:
        """One, its hash checked, as a ledger does."""
        data = self.objects[ref.key]
        if hashlib.sha256(data).hexdigest() != ref.sha256:
            raise RuntimeError("an object is damaged")
        return data


def median(work: Callable[[], Any], times: int = 5) -> tuple[float, Any]:
    """Median wall milliseconds, and the last result."""
    spans = []
    for _ in range(times):
        spent, result = wall(work)
        spans.append(spent)
    return statistics.median(spans), result


def published(change: list[TensorDelta], memory: Memory) -> tuple[float, list[ObjectRef]]:
    """The objects a trainer makes of a change; milliseconds to encode and hash them, on Parts' threads."""
    header = DeltaHeader("run", 2, 1, DEFAULT_CODEC)
    begin = time.perf_counter()
    parts = Parts(lambda part: (encode_delta(header, part), DEFAULT_CODEC), memory.put, BUCKET)
    for delta in change:
        parts.add(delta)
    refs = [one.ref for one in parts.finish()]
    return 1e3 * (time.perf_counter() - begin), refs


def staged(memory: Memory, refs: list[ObjectRef], weights: WeightMap, side: Cuda) -> Any:
    """What ``vllm_delta_plugin.stage`` does with one version's objects: fetch, decode, stage, make the swap."""
    builder = side.builder(weights, 2**62)
    with side.reading():
        for found in fetch(memory, refs, side.read, 2**28):  # type: ignore[arg-type]
            if not isinstance(found, Unpacked) or not builder.add_unpacked(found):
                raise SystemExit("the GPU does not decode what the trainer makes")
    return side.prepare(builder)


def entropy(objects: list[bytes], threads: int = 1) -> int:
    """Undo zstd alone; returns how many bytes come of it."""

    def work(data: bytes) -> int:
        return sum(len(decompress(s, "stream")) for s in read_container(data, DEFAULT_LIMITS)[1].values())

    with ThreadPoolExecutor(threads) as pool:
        return sum(pool.map(work, objects))


def by_host(weights: WeightMap, objects: list[bytes], side: Cuda) -> Any:
    """Decoded on one core, then staged."""
    builder = side.builder(weights, 2**62)
    with side.reading():
        for data in objects:
            builder.add_deltas({delta.name: [delta] for delta in decode_delta(data)[1]})
    return side.prepare(builder)


def upload_speed() -> float:
    """Bytes a millisecond from pinned memory to the device."""
    here = torch.empty(2**28, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device=DEVICE)
    return here.numel() / on_gpu(lambda: there.copy_(here, non_blocking=True))


def main() -> None:
    """One shape; a Markdown table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-8b")
    parser.add_argument("--density", type=float, default=0.01)
    args = parser.parse_args()
    speed = bandwidth()
    weights, side, memory = model(tensors_of(SHAPES[args.shape])), Cuda(DEVICE), Memory()
    found, changed, _ = deltas(weights, args.density)
    rehearse(weights.storages[0], side)
    size = sum(storage.bits.nbytes for storage in weights.storages)
    read = size / speed
    encoding, refs = published([delta for [delta] in found.values()], memory)
    objects = [memory.objects[ref.key] for ref in refs]
    print(torch.cuda.get_device_name(), args.shape, f"{changed:,} changed, {len(refs)} objects,",
          f"{sum(map(len, objects)):,} bytes; {os.cpu_count()} CPU cores; one dense read {read:.1f} ms\n")  # fmt: skip
    print("| what | ms | times one dense read |\n|---|---|---|")
    rows: list[tuple[str, float]] = [("encode and hash, 4 threads (trainer)", encoding)]
    for threads in (1, os.cpu_count() or 1):
        spent, inside = median(lambda threads=threads: entropy(objects, threads))
        rows.append((f"zstd alone, {threads} threads", spent))
    rows.append((f"upload of the {inside:,} bytes inside, at the bus's speed", inside / upload_speed()))
    rows.append(("decode, one core", median(lambda: [decode_delta(data) for data in objects], 3)[0]))

    def stage_decoded() -> Any:
        builder = side.builder(weights, 2**62)
        with side.reading():
            builder.add_deltas(found)
        return side.prepare(builder)

    near = [side.read(data) for data in objects]

    def stage_unpacked() -> Any:
        builder = side.builder(weights, 2**62)
        with side.reading():
            if not all(builder.add_unpacked(each) for each in near):  # type: ignore[arg-type]
                raise SystemExit("the GPU does not decode what the trainer makes")
        return side.prepare(builder)

    rows.append(("stage from decoded positions, one group", median(stage_decoded)[0]))
    rows.append(("decode on one core and stage", median(lambda: by_host(weights, objects, side), 3)[0]))
    rows.append(("decode on the GPU and stage, from unpacked objects", median(stage_unpacked)[0]))
    for threads in (1, 4, 8, 16, 32):
        fetching.AHEAD, os.environ[SETTING] = threads, str(threads)
        spent, swap = median(lambda: staged(memory, refs, weights, side))
        commit = on_gpu(lambda swap=swap: swap.swap(lambda: None), times=9)
        rows.append((f"fetch, decode, stage; {threads} threads", spent))
        rows.append((f"… and commit ({commit:.2f} ms)", spent + commit))
    for what, spent in rows:
        print(f"| {what} | {spent:.1f} | {spent / read:.1f} |", flush=True)


if __name__ == "__main__":
    main()
