"""A file laid out first and filled in any order holds what writing it in one pass would have."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from delta_sync.dtypes import dtype
from delta_sync.open_shard import OpenShard

HEADS = [
    ("scalar", dtype("F32"), ()),
    ("b", dtype("F32"), (7,)),
    ("empty", dtype("F32"), (0, 4)),
    ("a", dtype("F16"), (3, 5)),
    ("c", dtype("F16"), (2, 2, 2)),
]
VALUES = {"F16": np.float16, "F32": np.float32}


def test_pieces_written_in_any_order_make_the_checkpoint(tmp_path: Path) -> None:
    shard = OpenShard(tmp_path / "model.safetensors", HEADS)
    random = np.random.default_rng(0)
    wanted = {n: random.integers(0, 2**8, math.prod(shape)).astype(kind.carrier) for n, kind, shape in HEADS}
    for half in (1, 0):
        for name, *_ in reversed(HEADS):
            shard.tensor(name)[half::2] = wanted[name][half::2]
    found = load_file(shard.path)
    assert found.keys() == wanted.keys()
    for name, kind, shape in HEADS:
        assert (found[name].dtype, found[name].shape) == (VALUES[kind.name], shape)
        assert found[name].reshape(-1).view(kind.carrier).tolist() == wanted[name].tolist()
