"""Anchors of one run on a Hub bucket: what did not change is not uploaded again, counted at the test Hub."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from delta_sync.anchor_files import shard_layout, write_shard
from delta_sync.dtypes import dtype
from delta_sync.store import open_store

BF16 = dtype("BF16")
TENSORS = 16
ELEMENTS = 2**19  # 1 MiB each


def weights() -> dict[str, np.ndarray]:
    random = np.random.default_rng(3)
    return {f"layer.{k:02d}.weight": random.integers(0, 2**16, ELEMENTS, dtype=np.uint16) for k in range(TENSORS)}


def upload(store, folder: Path, version: int, bits: dict[str, np.ndarray]) -> None:
    heads = [(name, BF16, (ELEMENTS,)) for name in sorted(bits)]
    for file, members in shard_layout(heads, shard_bytes=8 * 2**20).items():
        write_shard(folder / file, ((*head, bits[head[0]]) for head in members))
        store.put_file(f"anchors/{version:012d}-000001/{file}", folder / file)


@pytest.mark.parametrize("which, most", [("nothing", 0.01), ("two tensors", 0.2), ("a run of rows", 0.1)])
def test_a_second_anchor_costs_what_changed(hub, hub_bucket, tmp_path, which, most) -> None:
    store = open_store(f"hf://buckets/{hub_bucket}/run")
    first = weights()
    upload(store, tmp_path, 1, first)
    before = sum(map(len, hub.cas.xorbs.values()))
    assert before > TENSORS * ELEMENTS * 2 * 0.9
    second = {name: bits.copy() for name, bits in first.items()}
    if which == "two tensors":
        for name in ("layer.03.weight", "layer.12.weight"):
            second[name] ^= 1
    elif which == "a run of rows":
        second["layer.00.weight"][1000:200_000] += 1
    upload(store, tmp_path, 2, second)
    assert sum(map(len, hub.cas.xorbs.values())) - before < most * before
