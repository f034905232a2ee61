"""Snapshot, change sets and their rebase: bit-exact, whatever is committed, fails or overlaps."""

from __future__ import annotations

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync.delta import apply, diff
from delta_sync.digest import digest, tensor_key
from delta_sync.dtypes import dtype
from delta_sync.errors import MappingError
from trl_callback.changes import ChangeSet, rebase
from trl_callback.gpu_snapshot import GpuSnapshot
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot

BF16 = dtype("BF16")
BITS = st.integers(0, 2**16 - 1)


def image_of(model) -> ServingImage:
    return ServingImage(model, lambda name: "BF16")


def bits(snapshot: Snapshot) -> dict[str, bytes]:
    return {name: held.tobytes() for name, _, _, held in snapshot}


def test_a_snapshot_moves_exactly_to_the_image_with_its_digests() -> None:
    model = tiny.llama()
    snapshot = Snapshot(image_of(model))
    for seed in range(3):
        tiny.nudge(model, seed=seed)
        deltas = snapshot.diff(image_of(model))
        assert 0 < sum(d.changed for d in deltas.values()) < snapshot.total_elements
        before = bits(snapshot), dict(snapshot.states)
        states = snapshot.advanced(deltas)
        assert (bits(snapshot), snapshot.states) == before
        promised = snapshot.digest_with(states)
        snapshot.apply(deltas, states)
        assert bits(snapshot) == {t.name: t.bits.tobytes() for t in image_of(model)}
        assert snapshot.digest_with({}) == promised
        for name, _, _, held in snapshot:
            assert snapshot.states[name].digest == digest(held, tensor_key(name))
    assert snapshot.diff(image_of(model)) == {}


def test_a_snapshot_that_compares_on_the_device_finds_the_same() -> None:
    """With PyTorch's operations, as where Triton is missing; extract_cases.py has the kernels."""
    model = tiny.llama()
    one, other = Snapshot(image_of(model)), GpuSnapshot(image_of(model), 10_000, resident=False)
    for seed in range(2):
        tiny.nudge(model, seed=seed)
        deltas, found = one.diff(image_of(model)), other.diff(image_of(model))
        assert list(found) == list(deltas)
        for name, delta in deltas.items():
            np.testing.assert_array_equal(found[name].positions, delta.positions)
            np.testing.assert_array_equal(found[name].values, delta.values)
        one.apply(deltas, one.advanced(deltas))
        other.apply(found, other.advanced(found))
    assert bits(other) == bits(one)
    model.resize_token_embeddings(tiny.VOCAB + 8)
    with pytest.raises(MappingError, match=r"embed_tokens.*resize"):
        other.diff(image_of(model))


def test_weights_that_machines_round_differently_are_cast_as_checkpoints_are() -> None:
    """Beside numbers, of which float32 weights are compared without a copy: NaNs and denormal numbers."""
    model = tiny.llama()
    snapshot = Snapshot(image_of(model))
    with torch.no_grad():
        odd = model.model.layers[0].mlp.down_proj.weight.view(-1)
        odd[:6] = torch.tensor([torch.nan, 1e-40, -1e-40, torch.inf, -0.0, 3.4028e38])
    deltas = snapshot.diff(image_of(model))
    assert list(deltas) == ["model.layers.0.mlp.down_proj.weight"]
    snapshot.apply(deltas, snapshot.advanced(deltas))
    assert bits(snapshot) == {t.name: t.bits.tobytes() for t in image_of(model)}


def test_the_snapshot_owns_its_bits() -> None:
    model = tiny.llama().bfloat16()
    snapshot = Snapshot(image_of(model))
    before = bits(snapshot)
    tiny.nudge(model, seed=1, scale=0.1)
    assert bits(snapshot) == before


def test_a_snapshot_holds_two_bytes_an_element() -> None:
    snapshot = Snapshot(image_of(tiny.llama()))
    assert snapshot.total_bytes == 2 * snapshot.total_elements == sum(held.nbytes for *_, held in snapshot)


def test_a_changed_layout_is_named() -> None:
    model = tiny.llama()
    snapshot = Snapshot(image_of(model))
    model.resize_token_embeddings(tiny.VOCAB + 8)
    with pytest.raises(MappingError, match=r"embed_tokens.*resize"):
        snapshot.diff(image_of(model))
    with pytest.raises(MappingError, match=r"layers\.1\..*gone"):
        snapshot.diff(image_of(tiny.llama(layers=1)))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(BITS, st.booleans(), BITS, st.booleans(), BITS), min_size=1, max_size=40))
def test_rebase_is_exact(rows: list[tuple[int, bool, int, bool, int]]) -> None:
    """base -> committed and base -> waiting, any bits at all: rebased waiting leads from committed to waiting."""
    base = np.array([row[0] for row in rows], "<u2")
    committed = np.array([row[2] if row[1] else row[0] for row in rows], "<u2")
    waiting = np.array([row[4] if row[3] else row[0] for row in rows], "<u2")
    moved = rebase(change_set(base, waiting), change_set(base, committed))
    live = committed.copy()
    for delta in moved.deltas.values():
        apply(delta, live)
    assert live.tolist() == waiting.tolist()
    assert moved.changed == int((committed != waiting).sum())


def change_set(old: np.ndarray, new: np.ndarray) -> ChangeSet:
    delta = diff("t", BF16, old.shape, old, new)
    return ChangeSet(1, {"t": delta} if delta.changed else {})
