"""Positions of shards: cutting a parameter and its checkpoint tensors in any way loses and doubles no element."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync.cover import check_cover
from delta_sync.errors import MappingError
from trl_callback.layout import Box, Region, Source, cut, flattened, row_major, sources, whole

SHAPES = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(tuple)


@st.composite
def sharded(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Source], list[Box]]:
    """A parameter, the checkpoint tensors it becomes (slices along one axis, turned about), and boxes that share it."""
    shape = draw(SHAPES)
    index = np.arange(math.prod(shape)).reshape(shape)
    axis = draw(st.integers(0, len(shape) - 1))
    found = []
    for number in range(shape[axis]):
        part = index.take(number, axis) if draw(st.booleans()) else index.take([number], axis)
        part = part.transpose(draw(st.permutations(range(part.ndim))))
        strides = tuple(
            int(np.take(part, 1, a).flat[0] - part.flat[0]) if part.shape[a] > 1 else 1 for a in range(part.ndim)
        )
        found.append(Source(f"t{number}", part.shape, int(part.flat[0]), strides))
    along = draw(st.integers(0, len(shape) - 1))
    edges = sorted({0, shape[along], *draw(st.lists(st.integers(0, shape[along]), max_size=3))})
    boxes = []
    for low, high in pairwise(edges):
        start = tuple(low if a == along else 0 for a in range(len(shape)))
        boxes.append(Box(start, tuple(high - low if a == along else n for a, n in enumerate(shape))))
    return shape, found, boxes


@given(sharded())
@settings(deadline=None, max_examples=300)
def test_boxes_hold_every_element_of_every_source_once(case: tuple[tuple[int, ...], list[Source], list[Box]]) -> None:
    shape, found, boxes = case
    parameter = torch.arange(math.prod(shape)).reshape(shape)
    for source in found:
        expected = torch.as_strided(parameter, source.shape, source.strides, source.offset).reshape(-1)
        rebuilt = torch.full_like(expected, -1)
        regions = []
        for box in boxes:
            where = cut(source, shape, box)
            if where is None:
                continue
            local = parameter[tuple(slice(s, s + n) for s, n in zip(box.start, box.size, strict=True))]
            elements = where.of(local).reshape(-1)
            positions = where.region.positions(np.arange(elements.numel()))
            assert (np.diff(positions) > 0).all()
            rebuilt[torch.from_numpy(positions)] = elements
            regions.append(where.region)
        assert torch.equal(rebuilt, expected)
        check_cover(source.name, source.shape, regions)


@given(SHAPES, st.integers(1, 4))
def test_flat_shards_hold_every_element_once(shape: tuple[int, ...], ranks: int) -> None:
    size = math.prod(shape)
    each = -(-size // ranks)
    source = flattened(Source("t", shape, 0, row_major(shape)))
    boxes = [Box((min(r * each, size),), (max(0, min(each, size - r * each)),)) for r in range(ranks)]
    cuts = [where for box in boxes if (where := cut(source, (size,), box)) is not None]
    check_cover("t", shape, [where.region for where in cuts])
    assert sum(where.region.size for where in cuts) == size


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen3_moe, tiny.mixtral, tiny.llava])
def test_sources_are_where_saving_takes_the_elements_from(build: object) -> None:
    model = build()  # type: ignore[operator]
    expected = tiny.cast_state(model, torch.float32)
    for name, parameter in model.named_parameters():
        for source in sources(model, name, tuple(parameter.shape)):
            found = torch.as_strided(parameter.detach(), source.shape, source.strides, source.offset)
            assert torch.equal(found, expected.pop(source.name)), source.name
    assert not expected


def test_a_source_that_is_no_run_is_refused_for_flat_shards() -> None:
    with pytest.raises(MappingError, match=r"'t', in flat shards.*one after the other"):
        flattened(Source("t", (3, 2), 0, (1, 3)))


def test_a_conversion_that_moves_elements_about_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.llama()
    monkeypatch.setattr("trl_callback.layout.checkpoint_tensors", lambda model, name, tensor: {name: tensor.flip(0)})
    with pytest.raises(MappingError, match=r"'model.norm.weight'.*LlamaForCausalLM"):
        sources(model, "model.norm.weight", (32,))


def test_positions_of_a_block_with_holes() -> None:
    block = Region(5, (10, 1), (2, 3))
    assert block.positions(np.arange(6)).tolist() == [5, 6, 7, 15, 16, 17]
    assert whole((2, 3)).positions(np.arange(6)).tolist() == list(range(6))
