"""Weights that processing puts elsewhere after loading: they are followed element by element, or refused by name."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from family_case import Outcome, serve
from helpers.families import FAMILIES

from delta_sync.errors import MappingError
from vllm_delta_plugin.affine import affine
from vllm_delta_plugin.after_loading import Fingerprint, verify_direct
from vllm_delta_plugin.compat import cpu_moe_seam
from vllm_delta_plugin.compat.process_seam import unprocessed
from vllm_delta_plugin.coverage import WeightMap, map_weights
from vllm_delta_plugin.regions import locate
from vllm_delta_plugin.trace import trace_load

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EXPERTS, INNER, HIDDEN = 2, 64, 64
SHAPES = {f"{layer}.{e}.{part}": (INNER, HIDDEN) for layer in "ab" for e in range(EXPERTS) for part in ("gate", "up")}
SHAPES |= {f"{layer}.bias": (EXPERTS, 2 * INNER) for layer in "ab"}


def swapped(layer: torch.nn.Module) -> None:
    """As for FlashInfer's CUTLASS kernels."""
    gate, up = layer.w13.data.chunk(2, dim=1)
    layer.w13 = torch.nn.Parameter(torch.cat([up, gate], dim=1), requires_grad=False)


def shuffled_in_blocks(layer: torch.nn.Module) -> None:
    """As for FlashInfer's TensorRT-LLM kernels: gate and up interleaved, rows shuffled in tiles, columns in blocks."""
    rows = layer.w13.data.view(EXPERTS, 2, INNER, HIDDEN).transpose(1, 2).reshape(EXPERTS, -1, 8, 4, HIDDEN)
    blocks = rows.transpose(2, 3).reshape(EXPERTS, 2 * INNER, HIDDEN // 16, 16).transpose(1, 2)
    layer.w13.data.copy_(blocks.reshape(layer.w13.shape))
    layer.bias.data.copy_(layer.bias.data.view(EXPERTS, 2, INNER).transpose(1, 2).reshape(EXPERTS, -1))


def padded(layer: torch.nn.Module) -> None:
    wide = layer.w13.new_zeros(EXPERTS, 2 * INNER, HIDDEN + 32)
    wide[..., :HIDDEN] = layer.w13
    layer.w13 = torch.nn.Parameter(wide, requires_grad=False)


def transposed(layer: torch.nn.Module) -> None:
    layer.w13.data = layer.w13.data.transpose(1, 2).contiguous()


def split(layer: torch.nn.Module) -> None:
    gate, up = layer.w13.data.chunk(2, dim=1)
    layer.w13 = torch.nn.Parameter(gate.contiguous(), requires_grad=False)
    layer.w3 = torch.nn.Parameter(up.contiguous(), requires_grad=False)


def irregular(layer: torch.nn.Module) -> None:
    rows = layer.w13.data.view(EXPERTS, -1, 16 * HIDDEN)[:, [5, 0, 2, 7, 6, 1, 3, 4]]
    layer.w13.data.copy_(rows.reshape(layer.w13.shape))


def doubled(layer: torch.nn.Module) -> None:
    layer.w13.data.mul_(2)


def repeated(layer: torch.nn.Module) -> None:
    layer.w13 = torch.nn.Parameter(layer.w13.data.repeat(2, 1, 1), requires_grad=False)


def left_out(layer: torch.nn.Module) -> None:
    layer.w13 = torch.nn.Parameter(layer.w13.data[:, 1:].clone(), requires_grad=False)


def scattered(layer: torch.nn.Module) -> None:
    order = torch.randperm(layer.w13.numel(), generator=torch.Generator().manual_seed(0))
    layer.w13.data.copy_(layer.w13.data.view(-1)[order].view(layer.w13.shape))


def by_value(layer: torch.nn.Module) -> None:
    layer.w13.data.copy_(layer.w13.data.sort(dim=-1).values)


class Method:
    def __init__(self, process: Callable[[torch.nn.Module], None]) -> None:
        self.process_weights_after_loading = process


class Model(torch.nn.Module):
    """Two layers of fused experts that are processed alike, loaded an expert's part at a time."""

    def __init__(self, process: Callable[[torch.nn.Module], None]) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name in "ab":
            layer = torch.nn.Module()
            layer.w13 = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER, HIDDEN).bfloat16(), requires_grad=False)
            layer.bias = torch.nn.Parameter(torch.randn(EXPERTS, 2 * INNER).bfloat16(), requires_grad=False)
            layer.gate = torch.nn.Parameter(torch.randn(4), requires_grad=False)  # of another width
            layer.quant_method = Method(process)
            self.add_module(name, layer)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.place(name).copy_(tensor)

    def place(self, name: str) -> torch.Tensor:
        layer, *rest = name.split(".")
        if rest == ["bias"]:
            return getattr(self, layer).bias.data
        expert, part = rest
        return getattr(self, layer).w13.data[int(expert)].chunk(2)[part == "up"]


def processed(
    process: Callable[[torch.nn.Module], None], zero: str | None = None
) -> tuple[WeightMap, dict[str, bytes]]:
    """The map of a model after ``process``, and each tensor's bits as they were loaded; ``zero``: a tensor of zeros."""
    model = Model(process).to(DEVICE)
    if zero is not None:
        model.place(zero).zero_()
    bits = {name: model.place(name).cpu().contiguous().view(torch.int16).numpy().tobytes() for name in SHAPES}
    weights = map_weights(model, trace_load(model, SHAPES, torch.bfloat16), SHAPES)
    before, modules = Fingerprint.take(model, weights), unprocessed(model)
    weights.let_go()
    old = weakref.ref(model.a.w13)
    for name in "ab":
        process(getattr(model, name))
    gc.collect()
    assert old() is None or old() is model.a.w13, "what vLLM replaces is freed before the map is made"
    verify_direct(model, weights, before, modules)
    return weights, bits


def served(weights: WeightMap, name: str) -> bytes:
    """A tensor as the map finds it in live memory."""
    out = np.full(int(np.prod(SHAPES[name])), -1, np.int16)
    for region in weights.regions[name]:
        positions, places = locate(region, np.arange(region.numel))
        out[positions] = weights.storages[region.storage].bits.cpu().numpy()[places]
    return out.tobytes()


@pytest.mark.parametrize("process", [swapped, shuffled_in_blocks, padded, transposed, split, irregular])
def test_elements_are_followed_to_where_they_are_served(process: Callable[[torch.nn.Module], None]) -> None:
    weights, bits = processed(process)
    weights.check()
    assert {name: served(weights, name) for name in SHAPES} == bits
    assert "a.w13" in weights.rearranged
    assert sum(len(regions) for regions in weights.regions.values()) <= 8 * len(SHAPES)


def test_zeros_are_followed_with_what_is_processed_beside_them_or_alike() -> None:
    plain, _ = processed(shuffled_in_blocks)
    for name in ("a.bias", "b.0.up", "b.bias"):
        weights, _ = processed(shuffled_in_blocks, zero=name)
        assert weights.regions == plain.regions


@pytest.mark.parametrize("process", [doubled, repeated, left_out, scattered, by_value])
def test_what_is_not_only_put_elsewhere_is_refused_by_name(process: Callable[[torch.nn.Module], None]) -> None:
    weights, _ = processed(process)
    with pytest.raises(MappingError, match=r"'a\.0\.gate'.*after loading"):
        weights.check()


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


@pytest.fixture
def packed_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM packs experts for its CPU kernel, as it does without the plugin."""
    from vllm import _custom_ops

    module = cpu_moe_seam._module()
    monkeypatch.setattr(cpu_moe_seam, "install", lambda: None)
    for name in ("cpu_prepack_moe_weight", "cpu_fused_moe"):
        monkeypatch.setattr(module, name, getattr(_custom_ops, name))


@pytest.mark.skipif(DEVICE == "cuda", reason="a CPU's kernels")
@pytest.mark.parametrize("family", ["Qwen3-MoE", "Mixtral", "GPT-OSS"])
def test_experts_that_vllm_packs_are_what_a_fresh_load_packs(family: str, tmp_path: Path, packed_experts: None) -> None:
    assert serve(FAMILIES[family], tmp_path) == Outcome("rearranged")
