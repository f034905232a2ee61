"""The index map of affine regions against plain numpy views."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync.digest import digest, tensor_key
from delta_sync.errors import MappingError
from vllm_delta_plugin.live_digest import region_digest, torch_digest
from vllm_delta_plugin.live_storage import live_storage
from vllm_delta_plugin.regions import Region, gather_source, locate, make_region, map_positions, overlapping, split

Load = tuple[tuple[int, ...], Region, np.ndarray]


@st.composite
def loads(draw: st.DrawFn) -> Load:
    """A checkpoint shape, the region of one slice copied into a padded, permuted buffer, and where it went.

    The last item is, for each live element, the checkpoint position it came from, or -1.
    """
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    source = np.arange(int(np.prod(shape))).reshape(shape)
    cuts = [sorted(draw(st.tuples(st.integers(0, n - 1), st.integers(1, n)))) for n in shape]
    piece = source[tuple(slice(lo, max(hi, lo + 1)) for lo, hi in cuts)]
    order = draw(st.permutations(range(len(shape))))
    moved = piece.transpose(order)
    room = tuple(n + draw(st.integers(0, 2)) for n in moved.shape)
    start = tuple(draw(st.integers(0, r - n)) for r, n in zip(room, moved.shape, strict=True))
    live = np.full(room, -1)
    target = live[tuple(slice(s, s + n) for s, n in zip(start, moved.shape, strict=True))]
    target[...] = moved
    offset = sum(s * st_ // live.itemsize for s, st_ in zip(start, live.strides, strict=True))
    region = make_region(
        "t",
        0,
        tuple(moved.shape),
        int(piece.reshape(-1)[0]),
        tuple(s // source.itemsize for s in moved.strides) if moved.base is not None else (),
        offset,
        tuple(s // live.itemsize for s in target.strides),
    )
    return shape, region, live.reshape(-1)


@settings(max_examples=300, deadline=None)
@given(loads(), st.randoms(use_true_random=False))
def test_positions_map_to_the_elements_that_were_copied(case: Load, random: Random) -> None:
    shape, region, live = case
    total = int(np.prod(shape))
    positions = np.array(sorted(random.sample(range(total), random.randint(0, total))), np.int64)
    which, dst = map_positions(region, positions)
    assert live[dst].tolist() == positions[which].tolist()
    assert set(positions[which]) == set(positions) & set(live[live >= 0])


@settings(max_examples=200, deadline=None)
@given(loads(), st.integers(1, 50))
def test_pieces_cover_the_region_once(case: Load, size: int) -> None:
    _, region, live = case
    pieces = list(split(region, size))
    assert all(p.numel <= max(size, 1) for p in pieces)
    found = [locate(p, np.arange(p.numel)) for p in pieces]
    positions, dst = (np.concatenate([f[i] for f in found]) for i in (0, 1))
    assert live[dst].tolist() == positions.tolist()
    assert sorted(positions) == sorted(live[live >= 0])
    assert not overlapping((p.src_offset, p.src_strides, p.shape) for p in pieces)


@settings(max_examples=100, deadline=None)
@given(loads(), st.integers(0, 2**32 - 1))
def test_digests_of_live_regions_are_those_of_the_checkpoint(case: Load, seed: int) -> None:
    shape, region, live = case
    bits = np.random.default_rng(seed).integers(0, 2**16, int(np.prod(shape))).astype(np.uint16)
    memory = np.where(live >= 0, bits[live], 12345).astype(np.uint16)
    storage = live_storage("p", torch.from_numpy(memory.view(np.int16)).view(torch.bfloat16))
    expected = sum(digest(bits[i : i + 1], tensor_key("t"), start=int(i)) for i in live[live >= 0]) % 2**64
    assert region_digest(storage, region) == expected
    assert torch_digest(storage.bits, region, tensor_key("t"), 2) == expected
    assert sorted(gather_source(bits, region)) == sorted(
        storage.read_box(region.shape, region.dst_offset, region.dst_strides)
    )


def test_chunked_torch_digest_equals_the_compiled_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vllm_delta_plugin.live_digest._CHUNK", 100)
    values = torch.randn(40, 60, generator=torch.Generator().manual_seed(0))
    storage = live_storage("p", values)
    region = make_region("w", 0, (40, 60), 0, (60, 1), 0, (60, 1))
    rows = make_region("w", 0, (40, 30), 30, (60, 1), 30, (60, 1))
    for r in (region, rows):
        assert torch_digest(storage.bits, r, tensor_key("w"), 4) == region_digest(storage, r)


def test_the_key_depends_on_source_elements_only() -> None:
    packed = make_region("w", 0, (8, 4), 32, (4, 1), 0, (4, 1))
    padded = make_region("w", 3, (8, 4), 32, (4, 1), 7, (16, 1))
    assert packed.key == padded.key == "w|32|(1,)|(32,)"
    assert make_region("w", 0, (8, 2), 2, (4, 1), 0, (2, 1)).key == "w|2|(4, 1)|(8, 2)"
    assert make_region("w", 0, (1, 1), 5, (4, 1), 0, (2, 1)).key == "w|5|()|()"


@pytest.mark.parametrize("strides", [(0, 1), (2, 1)])
def test_repeated_source_elements_are_refused(strides: tuple[int, int]) -> None:
    with pytest.raises(MappingError, match=r"'w'.*reads each checkpoint element once"):
        make_region("w", 0, (3, 4), 0, strides, 0, (4, 1))


def test_overlaps_are_found_between_interleaved_boxes() -> None:
    left, right = (0, (8, 1), (4, 4)), (4, (8, 1), (4, 4))
    assert not overlapping([left, right])
    assert overlapping([left, (3, (8, 1), (4, 4))])
    assert overlapping([left, left])
    assert not overlapping([(0, (1,), (4,)), (4, (1,), (4,))])
