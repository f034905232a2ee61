"""Weights that processing puts elsewhere after loading: they are followed element by element, or refused by name."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from family_case import Outcome, serve
from helpers.families import FAMILIES
from processed_model import (
    DEVICE,
    EXPERTS,
    HIDDEN,
    INNER,
    SHAPES,
    Method,
    Model,
    Process,
    by_value,
    doubled,
    exchanged,
    gone,
    irregular,
    left_out,
    narrowed,
    only_of_one,
    padded,
    processed,
    repeated,
    scattered,
    seen_twice,
    served,
    shuffled_in_blocks,
    split,
    split_in_two,
    strict,
    swapped,
    transposed,
)

from delta_sync.context_file import PartOf
from delta_sync.context_model import Tile
from delta_sync.dtypes import DTYPES
from delta_sync.errors import MappingError
from vllm_delta_plugin.affine import affine
from vllm_delta_plugin.after_loading import Fingerprint, verify_direct
from vllm_delta_plugin.base_bits import live_bits
from vllm_delta_plugin.compat import cpu_moe_seam
from vllm_delta_plugin.compat.process_seam import unprocessed
from vllm_delta_plugin.coverage import map_weights
from vllm_delta_plugin.trace import trace_load


@pytest.mark.parametrize(
    "process", [swapped, shuffled_in_blocks, padded, transposed, split, split_in_two, seen_twice, irregular]
)
def test_elements_are_followed_to_where_they_are_served(process: Process) -> None:
    weights, bits, _ = processed(process)
    weights.check()
    assert {name: served(weights, name) for name in SHAPES} == bits
    assert "a.w13" in weights.rearranged
    regions = [region for regions in weights.regions.values() for region in regions]
    assert len(regions) <= 8 * len(SHAPES)
    assert max(len(region.shape) for region in regions) <= 4, "what the GPU's kernels take"


def test_what_is_replaced_is_freed_before_the_map_is_made() -> None:
    """Else a card would have to hold all experts twice."""
    memory: list[int] = []

    def freed(model: Model) -> None:
        assert [torch.UntypedStorage._expired(reference) for reference in memory] == [True]

    weights, _, _ = processed(
        swapped, before=lambda model: memory.append(model.a.w13.untyped_storage()._weak_ref()), after=freed
    )
    assert weights.rearranged


@pytest.mark.usefixtures("a_group_of_one")
def test_processing_that_asks_other_ranks_is_refused_and_waits_for_none() -> None:
    weights, _, _ = processed(exchanged)
    with pytest.raises(MappingError, match=r"'a\.0\.gate'.*this rank's weights alone, got a call of c10d"):
        weights.check()


def test_zeros_are_followed_with_what_is_processed_beside_them_or_alike() -> None:
    plain, _, _ = processed(shuffled_in_blocks)
    for name in ("a.bias", "b.0.up", "b.bias"):
        weights, _, _ = processed(shuffled_in_blocks, before=lambda model, name=name: model.place(name).zero_())
        assert weights.regions == plain.regions


@pytest.mark.parametrize(
    "process", [doubled, repeated, left_out, scattered, by_value, strict, gone, narrowed], ids=lambda p: p.__name__
)
def test_what_is_not_only_put_elsewhere_is_refused_by_name(process: Process) -> None:
    weights, _, _ = processed(process)
    with pytest.raises(MappingError, match=r"'a\.0\.gate'.*after loading"):
        weights.check()


def head_of_another(model: Model) -> None:
    model.head = torch.nn.Module()
    model.head.weight = model.a.w13


def buffer_of_another(model: Model) -> None:
    model.register_buffer("part", model.a.w13.data[0])


def attribute_of_another(model: Model) -> None:
    model.part = model.a.w13.data[0]


@pytest.mark.parametrize("share", [head_of_another, buffer_of_another, attribute_of_another])
def test_who_shares_memory_that_is_replaced_is_named(share: Callable[[Model], None]) -> None:
    weights, _, _ = processed(swapped, before=share)
    with pytest.raises(MappingError, match=r"'(head\.weight|\.part)'|'part'.*left in memory"):
        weights.check()


def joined(model: Model) -> None:
    both = torch.cat([model.a.bias.data, model.b.bias.data])
    model.a.bias.data, model.b.bias.data = both.chunk(2)


def one_for_both(model: Model) -> None:
    model.a.bias.data = model.b.bias.data = model.a.bias.data.clone()


def zeroed(model: Model) -> None:
    for name in ("a.bias", "b.bias"):
        model.place(name).zero_()


@pytest.mark.parametrize("after", [joined, one_for_both])
def test_zeros_that_something_else_moves_are_not_taken_for_processed(after: Callable[[Model], None]) -> None:
    weights, _, _ = processed(swapped, zeroed, after)
    with pytest.raises(MappingError, match=r"'[ab]\.bias'"):
        weights.check()


def widened(model: Model) -> None:
    model.b.wide = True


def loaded_in_a_buffer(model: Model) -> None:
    for layer in (model.a, model.b):
        bias = layer.bias.data
        del layer.bias
        layer.register_buffer("bias", bias)


def loaded_in_a_view(model: Model) -> None:
    for layer in (model.a, model.b):
        layer.bias.data = torch.cat([layer.bias.data, layer.bias.data])[EXPERTS:]


@pytest.mark.parametrize(
    ("before", "process"),
    [(widened, only_of_one), (loaded_in_a_buffer, shuffled_in_blocks), (loaded_in_a_view, shuffled_in_blocks)],
)
def test_modules_of_other_kinds_are_refused_by_name(before: Callable[[Model], None], process: Process) -> None:
    weights, _, _ = processed(process, before)
    with pytest.raises(MappingError, match=r"tensor '[ab]\."):
        weights.check()


def test_a_head_that_is_tied_in_an_earlier_module_is_still_found() -> None:
    weights, bits, _ = processed(lambda layer: None, after=lambda model: setattr(model, "early", model.a.w13))
    weights.check()
    assert {name: served(weights, name) for name in SHAPES} == bits


class Kernel(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = weight


class KeepingMethod(torch.nn.Module):
    """Gives itself and the module a kernel, and writes to a buffer."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        swapped(layer)
        self.kernel, layer.kernel = Kernel(layer.w13), Kernel(layer.w13)
        layer.scale.mul_(2)


def test_a_second_processing_leaves_the_served_module_alone() -> None:
    def keeping(model: Model) -> None:
        for layer in (model.a, model.b):
            layer.quant_method = KeepingMethod()
            layer.register_buffer("scale", torch.ones(1, device=DEVICE))

    weights, bits, model = processed(lambda layer: layer.quant_method.process_weights_after_loading(layer), keeping)
    weights.check()
    assert {name: served(weights, name) for name in SHAPES} == bits
    for layer in (model.a, model.b):
        assert layer.kernel.weight is layer.w13 and layer.quant_method.kernel.weight is layer.w13
        assert layer.scale.tolist() == [2]


class LeftHalf(torch.nn.Module):
    """One of two ranks, which loads the left half of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Module()
        self.layer.w = torch.nn.Parameter(torch.randn(INNER, HIDDEN).bfloat16().to(DEVICE), requires_grad=False)

        def in_blocks(layer: torch.nn.Module) -> None:
            layer.w.data = layer.w.data.view(INNER, -1, 16).transpose(0, 1).contiguous()

        self.layer.quant_method = Method(in_blocks)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.layer.w.data.copy_(tensor[:, :HIDDEN])


def test_a_shard_has_the_tiles_that_it_had_where_it_is_put_elsewhere() -> None:
    """Which tiles a rank can decode, in the codec that looks at old weights, is a matter of what it loaded."""
    model, shape = LeftHalf(), (INNER, 2 * HIDDEN)
    loaded = model.layer.w.data.cpu().view(torch.int16).numpy().view(np.uint16).copy()
    weights = map_weights(model, trace_load(model, {"down": shape}, torch.bfloat16), {"down": shape})
    fingerprint, modules = Fingerprint.take(model, weights), unprocessed(model)
    model.layer.quant_method.process_weights_after_loading(model.layer)
    verify_direct(model, weights, fingerprint, modules)
    weights.check()
    assert weights.rearranged == {"layer.w"}
    part = live_bits(weights, "down", DTYPES["BF16"], shape)
    assert isinstance(part, PartOf)
    assert [part.holds(Tile(start, 2 * HIDDEN, INNER, HIDDEN)) for start in (0, HIDDEN)] == [True, False]
    assert np.array_equal(part.bits.reshape(shape)[:, :HIDDEN], loaded)


def test_any_map_is_cut_into_boxes_that_are_the_map() -> None:
    drawn = random.Random(0)
    for _ in range(500):
        shape = [drawn.randint(1, 4) for _ in range(drawn.randint(1, 4))]
        numbers = np.arange(np.prod(shape), dtype=np.int64)
        digits = numbers.reshape(shape).transpose(drawn.sample(range(len(shape)), len(shape))).ravel()
        anything = np.array(drawn.sample(range(numbers.size), numbers.size), dtype=np.int64)
        for places, most in ((digits, 1), (anything, numbers.size)):
            pieces = affine(numbers, places, most)
            assert pieces is not None
            found = np.full(numbers.size, -1, np.int64)
            for start, place, steps in pieces:
                one, other = np.array([start]), np.array([place])
                for size, step, to in steps:
                    one = (one[:, None] + np.arange(size) * step).ravel()
                    other = (other[:, None] + np.arange(size) * to).ravel()
                found[one] = other
            assert np.array_equal(found, places)


RARE = (pytest.mark.long, pytest.mark.rare)


@pytest.fixture
def packed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs experts for its CPU kernel, as it does without the plugin."""
    from vllm import _custom_ops

    from vllm_delta_plugin import worker_extension  # noqa: F401 - keeps experts plain, once in a process: not here, first

    module = cpu_moe_seam._module()
    for name in ("cpu_prepack_moe_weight", "cpu_fused_moe"):
        monkeypatch.setattr(module, name, getattr(_custom_ops, name))


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's kernels")
@pytest.mark.parametrize("family", ["Qwen3-MoE", *(pytest.param(f, marks=RARE) for f in ("Mixtral", "GPT-OSS"))])
def test_experts_that_vllm_packs_are_what_a_fresh_load_packs(family: str, tmp_path: Path, packed_experts: None) -> None:
    assert serve(FAMILIES[family], tmp_path) == Outcome("rearranged")


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's kernels")
def test_experts_that_vllm_pads_are_what_a_fresh_load_pads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does where their inner size is no multiple of 32, though the plugin keeps them from being packed."""
    family = FAMILIES["Qwen3-MoE"]
    odd = replace(family, name="odd", settings=family.settings | {"moe_intermediate_size": 48})
    monkeypatch.setitem(FAMILIES, odd.name, odd)
    assert serve(odd, tmp_path) == Outcome("rearranged")
