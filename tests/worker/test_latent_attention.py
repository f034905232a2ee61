"""What latent attention makes of a quantised projection, made again: vLLM's own class, and stand-ins for others."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat import fp8_seam
from vllm_delta_plugin.compat.mla_seam import Reader, readers

HEADS, NOPE, WIDTH, LATENT = 2, 3, 5, 4  # heads; of each, rows for keys and for values; columns
MADE = ("W_UK_T", "W_UV")
SCALE = 2.0  # of the cache, as it was calculated while serving


class Projection(torch.nn.Module):
    quant_method = None  # vLLM then takes the weight as it is, in the type that it asks for

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.weight = torch.nn.Parameter(torch.randn(HEADS * (NOPE + WIDTH), LATENT, generator=generator))


class OlderAttention(torch.nn.Module):
    """Keeps what it makes as plain attributes, and what is there already is written over."""

    def __init__(self, kernel: Any = None) -> None:
        super().__init__()
        self.impl = kernel or SimpleNamespace(process_weights_after_loading=lambda _: None)
        self.register_buffer("_k_scale", torch.tensor(1.0))

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(dtype)
        rows = self.kv_b_proj.weight.to(dtype).T.view(LATENT, HEADS, NOPE + WIDTH)
        keys, values = rows.split([NOPE, WIDTH], dim=-1)
        self._k_scale_cpu = torch.tensor(1.0)
        self.W_UV, self.W_UK_T = values.transpose(0, 1), keys.permute(1, 2, 0)
        self._k_scale.fill_(1.0)
        self.register_buffer("_k_scale_inverse", torch.tensor(1.0))


def vllms() -> Any:
    """vLLM's own, without a kernel."""
    from vllm.model_executor.layers.attention.attention import set_default_quant_scales
    from vllm.model_executor.layers.attention.mla_attention import MLAAttention

    attention = MLAAttention.__new__(MLAAttention)
    torch.nn.Module.__init__(attention)
    attention.kv_lora_rank, attention.num_heads = LATENT, HEADS
    attention.qk_nope_head_dim, attention.v_head_dim = NOPE, WIDTH
    for name in ("dcp_q_replicate", "is_amx_bmm_enabled"):
        setattr(attention, name, False)
    for name in ("is_aiter_triton_fp4_bmm_enabled", "is_aiter_triton_fp8_bmm_enabled"):
        setattr(attention, name, False)
    attention.quant_config, attention.layer_name, attention.W_UK_T_dcp_qrep = None, "l", None
    attention.impl = SimpleNamespace(process_weights_after_loading=lambda _: None)
    set_default_quant_scales(attention, register_buffer=True)
    return attention


def loaded(make: Callable[[], Any], seed: int) -> Any:
    attention = make()
    attention.kv_b_proj = Projection(seed)
    attention.process_weights_after_loading(torch.bfloat16)
    attention._k_scale.fill_(SCALE)
    attention._k_scale_cpu.fill_(SCALE)
    return attention


@pytest.mark.parametrize("make", [vllms, OlderAttention])
def test_what_is_made_is_what_a_fresh_load_makes_and_nothing_live_is_touched(make: Callable[[], Any]) -> None:
    live, fresh = loaded(make, 0), loaded(make, 1)
    before = {name: getattr(live, name).clone() for name in MADE}
    tensors = {id(t): t.clone() for t in (*live._parameters.values(), *live._buffers.values(), live._k_scale_cpu)}
    made = Reader("attn", live, torch.bfloat16).make(Projection(1))
    assert tuple(sorted(made)) == MADE
    for name, tensor in made.items():
        assert torch.equal(tensor, getattr(fresh, name)) and tensor.stride() == getattr(fresh, name).stride()
        assert torch.equal(getattr(live, name), before[name]) and not torch.equal(tensor, before[name])
    after = {id(t): t for t in (*live._parameters.values(), *live._buffers.values(), live._k_scale_cpu)}
    assert after.keys() == tensors.keys() and all(torch.equal(after[key], tensors[key]) for key in tensors)
    assert live._k_scale == live._k_scale_cpu == SCALE


class OfAllRanks(OlderAttention):
    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        super().process_weights_after_loading(dtype)
        torch.distributed.all_reduce(self.W_UV)


class WithAThird(OlderAttention):
    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        super().process_weights_after_loading(dtype)
        self.W_K = self.W_UV.contiguous()


class Packing:
    """A kernel that computes with a copy of its own."""

    kv_b_proj: Any = None

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.packed = self.kv_b_proj.weight.to(dtype)


def packed() -> OlderAttention:
    attention = OlderAttention(Packing())
    attention.impl.kv_b_proj = Projection(0)
    return attention


@pytest.mark.usefixtures("a_group_of_one")
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (OfAllRanks, "this rank's weights alone, got a call of c10d"),
        (WithAThird, r"W_UK_T and W_UV as all that is made of kv_b_proj, got \['W_K', 'W_UK_T', 'W_UV'\]"),
        (packed, r"by Packing \['packed'\].*another --attention-backend"),
    ],
)
def test_what_cannot_be_made_again_is_refused_by_name(make: Callable[[], Any], said: str) -> None:
    live = loaded(make, 0)
    kept = vars(live.impl).get("packed")
    with pytest.raises(MappingError, match=f"module 'l.0.attn'.*{said}"):
        Reader("l.0.attn", live, torch.bfloat16).make(Projection(1))
    assert vars(live.impl).get("packed") is kept


def test_readers_are_found_by_what_they_read() -> None:
    model, plain = torch.nn.Module(), torch.nn.Module()
    model.attn, model.plain = loaded(OlderAttention, 0), plain
    plain.kv_b_proj = model.attn.kv_b_proj  # holds it too, and makes nothing
    read = {plain.kv_b_proj}
    assert readers(model, read, torch.bfloat16) == {plain.kv_b_proj: Reader("attn", model.attn, torch.bfloat16)}
    model.other = OlderAttention()
    model.other.kv_b_proj = plain.kv_b_proj
    with pytest.raises(MappingError, match="modules 'attn' and 'other', expected one each"):
        readers(model, read, torch.bfloat16)
    assert readers(model, set(), torch.bfloat16) == {}, "of what is not quantised they are views"


def test_parameters_that_two_modules_hold_are_known_though_one_was_given_another() -> None:
    model, router, experts, other = (torch.nn.Module() for _ in range(4))
    model.router, model.experts, model.other = router, experts, other
    router.bias = experts.bias = torch.nn.Parameter(torch.ones(4))
    experts.weight = other.weight = torch.nn.Parameter(torch.ones(4))
    experts.scale = torch.nn.Parameter(torch.ones(4))
    experts.again = experts.scale
    for module in (experts, other):  # each as vLLM processes it
        fp8_seam.captured(module)
        for name in module._parameters:
            setattr(module, name, torch.nn.Parameter(torch.zeros(4)))
    twice = fp8_seam.held_twice(model, {"experts": experts, "other": other})
    assert twice == {("router", "bias"), ("experts", "bias"), ("experts", "weight"), ("other", "weight")}
