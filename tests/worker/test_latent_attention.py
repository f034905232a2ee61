"""What latent attention makes of a quantised projection, made again: stand-ins for both ways of vLLM's to keep it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.mla_seam import Reader, readers

HEADS, NOPE, WIDTH, LATENT = 2, 3, 5, 4  # heads; of each, rows for keys and for values; columns


class Kernel:
    """Keeps something of its own, as some of vLLM's do."""

    dtype: torch.dtype | None = None

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.dtype = dtype


class Attention(torch.nn.Module):
    """As vLLM's, whose two tensors lie between each other in one piece of memory."""

    def __init__(self, projection: torch.nn.Module) -> None:
        super().__init__()
        self.kv_b_proj, self.impl = projection, Kernel()

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        self.impl.process_weights_after_loading(dtype)
        rows = (self.kv_b_proj.weight.float() * 0.5).to(dtype).T.view(LATENT, HEADS, NOPE + WIDTH)
        keys, values = rows.split([NOPE, WIDTH], dim=-1)
        self.keep("W_UV", values.transpose(0, 1))
        self.keep("W_UK_T", keys.permute(1, 2, 0))

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        """Up to vLLM 0.31."""
        setattr(self, name, tensor)


class InPlace(Attention):
    """Since vLLM 0.32: a parameter, and what there is already is written over."""

    def keep(self, name: str, tensor: torch.Tensor) -> None:
        if (old := getattr(self, name, None)) is not None:
            old.data.copy_(tensor)
        else:
            self.register_parameter(name, torch.nn.Parameter(tensor, requires_grad=False))


class AllRanks(Attention):
    def keep(self, name: str, tensor: torch.Tensor) -> None:
        tensor = tensor.contiguous()
        torch.distributed.all_reduce(tensor)
        super().keep(name, tensor)


def projection(seed: int) -> torch.nn.Module:
    module = torch.nn.Module()
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(HEADS * (NOPE + WIDTH), LATENT, generator=generator).to(torch.float8_e4m3fn)
    module.weight = torch.nn.Parameter(weight, requires_grad=False)
    return module


def loaded(kind: type[Attention], seed: int) -> Any:
    attention = kind(projection(seed))
    attention.process_weights_after_loading(torch.bfloat16)
    attention.impl.dtype = None
    return attention


@pytest.mark.parametrize("kind", [Attention, InPlace])
def test_what_is_made_is_what_a_fresh_load_makes_and_nothing_live_is_touched(kind: type[Attention]) -> None:
    live, fresh = loaded(kind, 0), loaded(kind, 1)
    before = {name: getattr(live, name).clone() for name in ("W_UK_T", "W_UV")}
    made = Reader("attn", live, torch.bfloat16).make(projection(1))
    assert made.keys() == before.keys()
    for name, tensor in made.items():
        assert torch.equal(tensor, getattr(fresh, name)) and tensor.stride() == getattr(fresh, name).stride()
        assert torch.equal(getattr(live, name), before[name]) and not torch.equal(tensor, before[name])
    assert live.impl.dtype is None


@pytest.mark.usefixtures("a_group_of_one")
def test_what_is_made_with_other_ranks_is_refused_by_name() -> None:
    live = loaded(AllRanks, 0)
    with pytest.raises(MappingError, match=r"module 'l.0.attn'.*this rank's weights alone, got a call of c10d"):
        Reader("l.0.attn", live, torch.bfloat16).make(projection(1))


def test_readers_are_found_by_what_they_read() -> None:
    model, plain = torch.nn.Module(), torch.nn.Module()
    model.attn, model.plain = loaded(Attention, 0), plain
    plain.kv_b_proj = model.attn.kv_b_proj  # holds it too, and makes nothing
    assert readers(model, torch.bfloat16) == {model.attn.kv_b_proj: Reader("attn", model.attn, torch.bfloat16)}
