"""Anchor files laid out first and filled in any order are the checkpoint that writing in one pass gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from delta_sync.anchor_layout import AnchorLayout
from delta_sync.errors import FormatError
from delta_sync.manifest import TensorState

STATES = {
    "a": TensorState("F16", (3, 5), 0),
    "scalar": TensorState("F32", (), 0),
    "b": TensorState("F32", (7,), 0),
    "empty": TensorState("F32", (0, 4), 0),
    "c": TensorState("F16", (2, 2, 2), 0),
}
CARRIERS = {"F16": np.dtype("<u2"), "F32": np.dtype("<u4")}
VALUES = {"F16": np.float16, "F32": np.float32}


@pytest.mark.parametrize("shard_bytes", [1, 40, 2**30])
def test_pieces_written_in_any_order_make_the_checkpoint(tmp_path: Path, shard_bytes: int) -> None:
    layout = AnchorLayout(tmp_path, STATES, shard_bytes=shard_bytes)
    random = np.random.default_rng(0)
    wanted = {
        name: random.integers(0, 2**8, int(np.prod(state.shape, dtype=int))).astype(CARRIERS[state.dtype])
        for name, state in STATES.items()
    }
    for half in (1, 0):
        for name in reversed(STATES):
            layout.tensor(name)[half::2] = wanted[name][half::2]
    found: dict[str, np.ndarray] = {}
    shards = [path for name, path in layout.files.items() if name.endswith(".safetensors")]
    for shard in shards:
        found |= load_file(shard)
    assert found.keys() == STATES.keys()
    for name, values in found.items():
        state = STATES[name]
        assert (values.dtype, values.shape) == (VALUES[state.dtype], state.shape)
        assert values.reshape(-1).view(CARRIERS[state.dtype]).tolist() == wanted[name].tolist()
    if len(shards) > 1:
        index = json.loads(layout.files["model.safetensors.index.json"].read_text())
        assert index["weight_map"].keys() == STATES.keys()
        assert index["metadata"]["total_size"] == 15 * 2 + 4 + 7 * 4 + 8 * 2


def test_an_anchor_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="at least one tensor"):
        AnchorLayout(tmp_path, {})
