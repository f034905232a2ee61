"""Convolutions stay as they were loaded on CPUs where vLLM would pack them; Qwen3-Next itself: test_families.py."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from vllm import _custom_ops as ops
from vllm.platforms import current_platform

from vllm_delta_plugin.compat import cpu_conv_seam, cpu_gemm_seam

FWD, UPDATE = "causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu"


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, tuple[int, ...], bool]]:
    """What stand-ins for vLLM's kernels are told: name, shape of the weight, whether it is packed."""
    seen: list[tuple[str, tuple[int, ...], bool]] = []

    def fwd(x: Any, weight: torch.Tensor, bias: Any, is_weight_packed: bool) -> str:
        seen.append((FWD, tuple(weight.shape), is_weight_packed))
        return "out"

    def update(x: Any, conv_states: Any, weight: torch.Tensor, is_weight_packed: bool, accepted: Any = None) -> str:
        seen.append((UPDATE, tuple(weight.shape), is_weight_packed))
        return "out"

    monkeypatch.setattr(ops, FWD, fwd, raising=False)
    monkeypatch.setattr(ops, UPDATE, update, raising=False)
    return seen


def test_kernels_are_told_that_loaded_weights_are_plain(told: list[Any]) -> None:
    loaded, packed = torch.zeros(64, 1, 4), torch.zeros(64, 4)
    assert not cpu_conv_seam.reads_plain(loaded)
    cpu_conv_seam.install()
    cpu_conv_seam.install()  # once is enough
    assert cpu_conv_seam.reads_plain(loaded)
    assert not cpu_conv_seam.reads_plain(torch.zeros(4, 8, 8)), "experts"
    assert ops.causal_conv1d_fwd_cpu(x=None, weight=loaded, bias=None, is_weight_packed=True) == "out"
    assert ops.causal_conv1d_update_cpu(None, None, loaded, True) == "out"
    assert ops.causal_conv1d_update_cpu(None, None, packed, is_weight_packed=True) == "out"
    assert told == [(FWD, (64, 4), False), (UPDATE, (64, 4), False), (UPDATE, (64, 4), True)]


def test_loaded_weights_are_left_where_they_are(told: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers import utils

    repacked: list[torch.Tensor] = []
    monkeypatch.setattr(utils, cpu_gemm_seam._NAME, lambda layer, remove_weight: repacked.append(layer.weight))
    cpu_conv_seam.install()
    cpu_gemm_seam.install()
    layer = torch.nn.Module()
    for shape, left_alone in (((64, 1, 4), True), ((4, 8, 8), False)):
        layer.weight = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16))
        getattr(utils, cpu_gemm_seam._NAME)(layer, remove_weight=False)
        assert bool(repacked) is not left_alone, shape


def test_a_vllm_without_such_kernels_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (FWD, UPDATE):
        monkeypatch.delattr(ops, name, raising=False)
    cpu_conv_seam.install()
    assert not cpu_conv_seam.reads_plain(torch.zeros(64, 1, 4)) and not hasattr(ops, FWD)


def has_kernels() -> bool:
    """Whether this vLLM packs convolutions here, and its kernels can be told of plain ones."""
    told = "is_weight_packed" in inspect.signature(getattr(ops, FWD, len)).parameters  # not in 0.27
    return told and current_platform.is_cpu() and torch.cpu._is_avx512_bf16_supported()


@pytest.mark.skipif(not has_kernels(), reason="vLLM has no kernel for it on this CPU")
def test_answers_are_those_of_the_weight_as_it_was_loaded_and_as_it_is_now() -> None:
    current_platform.import_kernels()
    cpu_conv_seam.install()
    torch.manual_seed(0)
    weight, x = torch.randn(64, 1, 4).bfloat16(), torch.randn(10, 64).bfloat16()
    one = torch.zeros(1, dtype=torch.int32)

    def served() -> tuple[torch.Tensor, torch.Tensor]:
        """Ten tokens read at once, and an eleventh after them."""
        state = torch.zeros(1, 3, 64).bfloat16().transpose(1, 2)
        common = {"bias": None, "conv_states": state, "silu_activation": True, "is_weight_packed": True}
        until = torch.tensor([0, 10], dtype=torch.int32)
        read = ops.causal_conv1d_fwd_cpu(
            x=x.t(), weight=weight, query_start_loc=until, cache_indices=one, has_initial_state=torch.tensor([False]),
            **common,
        )  # fmt: skip
        return read, ops.causal_conv1d_update_cpu(x=x[:1], weight=weight, conv_state_indices=one, **common)

    def expected() -> tuple[torch.Tensor, torch.Tensor]:
        tokens = F.pad(torch.cat([x, x[:1]]).t().float(), (3, 0))
        out = F.silu(F.conv1d(tokens[None], weight.float(), groups=64)[0])
        return out[:, :10], out[:, 10:].t()

    for _ in range(2):
        for got, wanted in zip(served(), expected(), strict=True):
            torch.testing.assert_close(got.float(), wanted, rtol=0.02, atol=0.02)
        weight[5, 0, 2] += 3  # as a delta does it
