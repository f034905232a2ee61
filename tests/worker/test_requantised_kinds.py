"""Kinds of fp8 that this CPU cannot multiply, loaded and updated without a forward pass, which reads what is compared.

vLLM's CPU kernels for blocks pack the bytes of a weight for AMX and leave its scales; packing works on any CPU. Its
kernel that rounds a whole tensor is missing there, so PyTorch's operations stand in for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from family_case import differing, everything, quick_start
from helpers.families import FAMILIES
from helpers.server import free_port
from publishing import Publisher, nudged
from rank_pair import load
from test_requantised import KINDS, QWEN3

from delta_sync.plan import Position
from vllm_delta_plugin import worker_seams
from vllm_delta_plugin.compat.load_seam import weight_map
from vllm_delta_plugin.rank_sync import RankSync

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU serves all kinds: test_requantised.py")
_LATENT = FAMILIES["DeepSeek-V3"]
# A square projection: of one scale a tensor vLLM reads it transposed, as GPUs' kernels have it and this CPU's has not.
_SMALL_HEADS = {"first_k_dense_replace": 2, "qk_nope_head_dim": 32, "v_head_dim": 32}
_DENSE = replace(_LATENT, name="DeepSeek-V3 without experts", settings=_LATENT.settings | _SMALL_HEADS)
_MAX = torch.finfo(torch.float8_e4m3fn).max


def without_experts(folder: Path) -> Path:
    """For these vLLM has no kernel without AMX."""
    _DENSE.write(folder, wide=True)
    return folder


def rounded(weight: torch.Tensor, scale: torch.Tensor | None = None, **_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Stands in for vLLM's scaled_fp8_quant, which is not built for CPUs."""
    scale = (weight.abs().max().float() / _MAX).reshape(1) if scale is None else scale
    return (weight.float() / scale).clamp(-_MAX, _MAX).to(torch.float8_e4m3fn), scale


@pytest.fixture
def any_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    from vllm import _custom_ops
    from vllm.distributed import cleanup_dist_env_and_memory
    from vllm.model_executor.kernels.linear.scaled_mm.cpu import CPUFp8BlockScaledMMKernel

    worker_seams.install()
    monkeypatch.setattr(CPUFp8BlockScaledMMKernel, "is_supported", classmethod(lambda cls, _=None: (True, None)))
    monkeypatch.setattr(_custom_ops, "scaled_fp8_quant", rounded)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)
    with quick_start():
        yield
    cleanup_dist_env_and_memory()


@pytest.mark.parametrize(
    ("name", "bytes_each"), [("per tensor", 2), ("per block", 2), ("checkpoint in blocks", 1)], ids=lambda v: str(v)
)
@pytest.mark.parametrize("make", [QWEN3, without_experts], ids=["Qwen3", "DeepSeek-V3"])
def test_an_update_is_what_a_fresh_load_makes(
    make: Callable[[Path], Path], name: str, bytes_each: int, tmp_path: Path, any_cpu: None
) -> None:
    kind, port = KINDS[name], free_port()
    plain = make(tmp_path / "plain")
    values = tiny_models.tensors(plain)
    old, new = kind.stored(values), kind.stored(nudged(values, 0.01, seed=1))
    expected = everything(load(str(kind.write(plain, tmp_path / "new", new)), kind.options, 0, port, ranks=1))
    model = load(str(kind.write(plain, tmp_path / "old", old)), kind.options, 0, port, ranks=1)
    before = everything(model)
    publisher = Publisher(tmp_path / "run", old)
    sync = RankSync(weight_map(model), {"uri": publisher.uri}, rank=0, world_size=1)
    linear = {n for n in values if "_proj" in n and (kind.options or old[n].dtype != values[n].dtype)}
    if not kind.options:  # what latent attention reads is left as it is
        linear = {n for n in linear if "kv_b_proj" not in n}
    quantised = sum(values[n].numel() for n in linear)
    assert sync.describe()["shadow_bytes"] == bytes_each * quantised
    publisher.delta(new)
    sync.stage_begin(publisher.ledger.plan(Position(publisher.origin.version, publisher.origin.sha256), None))
    deadline = time.monotonic() + 60
    while (staged := sync.stage_poll())["state"] == "staging":
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert staged["state"] == "staged", staged
    assert not differing(everything(model), before)
    sync.commit(staged["target"])
    assert not differing(everything(model), expected)
    sync.undo(staged["target"])
    assert not differing(everything(model), before)
