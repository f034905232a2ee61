"""Layouts of whole tensors, beside those of changed elements in layouts.py, and how they are measured alike."""

from __future__ import annotations

import contextlib
import os
import statistics
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import zstandard
from traces import TracedChange

from delta_sync import DTYPES, DeltaHeader
from delta_sync.context_file import Change, decode_against, encode_against
from delta_sync.peer_layouts import Changed, Layout, changed_elements, gaps_of, positions_of

BF16 = DTYPES["BF16"]
Step = Sequence[TracedChange]
Way = tuple[Callable[[Step], Any], Callable[[Any, Step], Any]]  # weights to bytes, and bytes to what changes


class GapValue16(Layout):
    """TRL's later branch: u16 gaps and bfloat16 values as they are; the old value carries a gap over 65535."""

    name = "TRL: u16 gap + bf16"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        return b"".join(part.tobytes() for c in changes for part in self._filled(c))

    def _filled(self, c: Changed) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        gaps = gaps_of(c.positions)
        at = np.repeat(np.arange(gaps.size), gaps // 65536)
        filled = np.insert(gaps % 65536, at, 65535).astype(np.uint16)
        return np.array([filled.size], np.uint32), filled, np.insert(c.new, at, 0)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        at, found = 0, []
        for c in changes:
            n = int.from_bytes(data[at : at + 4], "little")
            gaps = np.frombuffer(data, np.uint16, n, at + 4)
            values = np.frombuffer(data, np.uint16, n, at + 4 + 2 * n)
            positions = positions_of(gaps)
            real = np.isin(positions, c.positions) if n != c.positions.size else slice(None)
            found.append((positions[real], values[real]))
            at += 4 + 4 * n
        return found


def xor_encode(step: Step) -> list[bytes]:
    coder = zstandard.ZstdCompressor(level=1)
    return [coder.compress(np.bitwise_xor(c.old, c.new)) for c in step]


def xor_decode(data: list[bytes], step: Step) -> list[np.ndarray]:
    coder = zstandard.ZstdDecompressor()
    return [
        np.bitwise_xor(np.frombuffer(coder.decompress(f), np.uint16), c.old) for f, c in zip(data, step, strict=True)
    ]


def raw_encode(step: Step) -> list[bytes]:
    return [c.new.tobytes() for c in step]


def raw_decode(data: list[bytes], step: Step) -> list[np.ndarray]:
    return [np.frombuffer(f, np.uint16).copy() for f in data]


def context_encode(step: Step) -> list[bytes]:
    changes = [Change(c.name, BF16, c.shape, c.old, c.new) for c in step]
    return [encode_against(DeltaHeader("benchmark", 2, 1, ""), changes)[1]]


def context_decode(data: list[bytes], step: Step) -> list[np.ndarray]:
    old = {c.name: c.old for c in step}
    return [d.positions for d in decode_against(data[0], lambda name, dtype, shape: old[name])[1]]


CONTEXT = "ours: context8-ulp8-zstd"
WHOLE: dict[str, Way] = {
    "raw safetensors": (raw_encode, raw_decode),
    "XOR of whole tensors, zstd-1": (xor_encode, xor_decode),
    CONTEXT: (context_encode, context_decode),
}


def way_of(layout: Layout) -> Way:
    """A layout of changed elements, from weights on: encoding includes finding them."""

    def encode(step: Step) -> list[bytes]:
        return [layout.encode([changed_elements(c.name, c.shape, c.old, c.new) for c in step])]

    kept: dict[int, list[Changed]] = {}  # what the decoder is told of the old weights is no work of its own

    def decode(data: list[bytes], step: Step) -> Any:
        if id(step) not in kept:
            kept[id(step)] = [changed_elements(c.name, c.shape, c.old, c.new) for c in step]
        return layout.decode(data[0], kept[id(step)])

    return encode, decode


def cost(run: Callable[[], object], repeats: int) -> tuple[float, int]:
    """CPU seconds of this thread, median of ``repeats``, and peak bytes of arrays and bytes made on the way.

    One run before the timed ones compiles and warms up, one after them is traced.
    """
    run()
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    tracemalloc.start()
    run()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return statistics.median(times), peak


def xet_bytes(step: Step) -> int:
    """Bytes that a Xet client uploads for the new checkpoint once the old one is stored, on the tests' own Hub."""
    with tempfile.TemporaryDirectory() as home, _hub(home) as hub:
        from huggingface_hub import batch_bucket_files, create_bucket

        create_bucket("bench/xet")
        sizes = []
        for part in ("old", "new"):
            path = Path(home) / f"{part}.safetensors"
            path.write_bytes(b"".join(getattr(c, part).tobytes() for c in step))
            batch_bucket_files("bench/xet", add=[(str(path), "model.safetensors")])
            sizes.append(sum(map(len, hub.cas.xorbs.values())))
    return sizes[1] - sizes[0]


@contextlib.contextmanager
def _hub(home: str) -> Iterator[Any]:
    """The tests' Hub in this process, named by HF_ENDPOINT."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
    from helpers.hub.server import WRITE_TOKEN, TestHub

    with TestHub() as hub:
        os.environ |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": WRITE_TOKEN, "HF_XET_CACHE": f"{home}/xet"}
        os.environ |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1"}
        yield hub
