"""A worker that follows a run holds its weights once, on host and device: no copy stays beside them.

``pytest -s`` shows the figures.
"""

from __future__ import annotations

import ctypes
import gc
import statistics
import sys
import time
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import psutil
import pytest
import tiny_models
import torch
from family_case import SMALL, quick_start
from publishing import Publisher, nudged
from replica import Replica, replica

from delta_sync.plan import Plan, Position
from vllm_delta_plugin.compat.load_seam import weight_map

LAYERS = 8
LARGE: dict[str, Any] = {  # 84 MB
    "hidden_size": 1024,
    "intermediate_size": 1536,
    "num_hidden_layers": LAYERS,
    "layer_types": ["full_attention"] * LAYERS,
}


@pytest.mark.long
def test_no_copy_of_the_weights_stays_beside_them(tmp_path: Path) -> None:
    """Attached, four versions staged and committed, one of them an anchor, and a scan: as in a replica's life."""
    small, large = tiny_models.make("qwen3", tmp_path / "small"), tiny_models.make("qwen3", tmp_path / "large", **LARGE)
    runs = [published(folder) for folder in (small, large)]
    with quick_start(), replica(small, **SMALL) as live:
        follow(live, *runs[0])  # compiles, pins, starts threads: what a process needs once
        del live
    with quick_start(), replica(large, **SMALL) as live:
        weights = sum(p.nbytes for p in live.model.parameters())
        assert weights > 70e6
        before = held()
        follow(live, *runs[1])
        allocated, own, device = (now - then for now, then in zip(held(), before, strict=True))
        maps = weight_map(live.model)
        count, tensors = sum(p.numel() for p in live.model.parameters()), len(maps.tensors)
        print(f"{weights} bytes of weights; beside them on the host {allocated}, in pages {own}, on a GPU {device}")
        print(f"index maps: {size(maps)} bytes, {count} parameters in {tensors} tensors")
        assert max(allocated, device) < weights / 4
        assert own < weights / 2
        assert size(maps) < 4096 * tensors
        for place in {"cpu", next(live.model.parameters()).device.type}:
            meter = 0 if place == "cpu" else 2
            kept = [p.detach().to(place, copy=True) for p in live.model.parameters()]
            assert held()[meter] - before[meter] > weights * 3 / 4, f"a copy that is kept on {place} would not be seen"
            del kept
        del maps, live


def published(folder: Path) -> tuple[str, list[Plan]]:
    """A run of four versions, and the way from each to the next; the last is taken from an anchor."""
    publisher = Publisher(folder.parent / f"{folder.name}-run", tiny_models.tensors(folder))
    plans, at = [], publisher.origin
    for seed in range(4):
        manifest = publisher.delta(nudged(publisher.tensors, 0.01, seed))
        if seed == 3:
            publisher.anchor()
        plan = publisher.ledger.plan(Position(at.version, at.sha256), None, prefer_anchor=seed == 3)
        assert plan is not None and plan.start == ("anchor" if seed == 3 else "position")
        plans.append(plan)
        at = manifest
    return publisher.uri, plans


def follow(live: Replica, uri: str, plans: list[Plan]) -> None:
    """Take all versions, and scan live memory."""
    live.attach(uri)
    for plan in plans:
        (staged,) = live.stage(plan)
        assert staged["state"] == "staged", staged
        live.one("commit", plan.target.version)
        live.one("settle", plan.target.version)
    live.one("audit_begin")
    (audit,) = live.wait("audit_poll", ("running",))
    assert audit["state"] == "done", audit


class Mallinfo(ctypes.Structure):
    """glibc's mallinfo2, summed over its arenas."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "mapped", "a", "b", "used", "free", "keep")
    ]


def held() -> tuple[int, int, int]:
    """Bytes allocated on the host, in pages of this process alone, and of tensors on a GPU: medians of five looks.

    Pages are more than what is allocated: the allocator keeps some that were given back, the more the larger tensors
    are. They also hold what was allocated past it.
    """
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = Mallinfo
    looks = []
    for _ in range(5):
        gc.collect()
        libc.malloc_trim(0)
        info = libc.mallinfo2()
        device = torch.cuda.memory_allocated() if torch.cuda.is_available() else 0
        looks.append((info.used + info.mapped, psutil.Process().memory_full_info().uss, device))
        time.sleep(0.1)
    allocated, own, device = (int(statistics.median(column)) for column in zip(*looks, strict=True))
    return allocated, own, device


def size(thing: object) -> int:
    """Bytes of everything that can be reached from ``thing`` but code, and what tensors are views of."""
    seen: dict[int, object] = {}
    found = [thing]
    while found:
        one = found.pop()
        if id(one) not in seen and not isinstance(one, type | ModuleType | FunctionType):
            seen[id(one)] = one
            found += gc.get_referents(one)
    return sum(sys.getsizeof(one) for one in seen.values())
