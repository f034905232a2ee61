"""Plain CPU kernels: they read weights where the checkpoint put them, so a delta written there is what is served.

vLLM's CPU backend repacks linear and expert weights into opaque buffers at load. Keeping them plain costs speed where
the CPU has 16-bit products, gains some where it has not (benchmarks/cpu_plain_weights.py measures it), and is the
only way in which single elements can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch.nn import functional as F

_CHUNK = 1 << 19  # weight elements widened at once: 2 MiB of float32, which stays in the cache
_MIN_ROWS = 4  # fewer rows than this are not worth widening weights for


@cache
def _native(dtype: torch.dtype) -> bool:
    """Whether this CPU multiplies the type itself; if not, PyTorch falls back to plain loops."""
    probes = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}
    return dtype not in probes or bool(getattr(torch.ops.mkldnn, probes[dtype])())


def use_plain_linear(layer: torch.nn.Module) -> None:
    """Stand in for vLLM's dispatch_cpu_unquantized_gemm: multiply with ``layer.weight`` itself, keep it."""
    linear = F.linear if _native(layer.weight.dtype) else widened_linear
    layer.cpu_linear = linear  # type: ignore[assignment]


@torch.library.custom_op("delta_sync::widened_linear", mutates_args=())
def widened_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` of 16-bit tensors on a CPU without 16-bit products: x ``[..., k]``, weight ``[n, k]``.

    Several rows are multiplied in float32, a cache-sized block of the weight at a time, and rounded once.
    """
    rows = x.reshape(-1, x.shape[-1])
    if rows.shape[0] < _MIN_ROWS:
        return F.linear(x, weight, bias)
    wide = rows.float()
    out = rows.new_empty(rows.shape[0], weight.shape[0])
    step = max(1, _CHUNK // weight.shape[1])
    scratch = _scratch(step * weight.shape[1])
    for start in range(0, weight.shape[0], step):
        block = weight[start : start + step]
        copy = scratch[: block.numel()].view(block.shape).copy_(block)
        out[:, start : start + step] = F.linear(
            wide, copy, None if bias is None else bias[start : start + step].float()
        )
    return out.view(*x.shape[:-1], weight.shape[0])


@widened_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


@cache
def _scratch(elements: int) -> torch.Tensor:
    """Float32 room that is kept: fresh pages would cost more than the product."""
    with torch.inference_mode(False):  # else it could not be written to outside of that mode
        return torch.empty(elements, dtype=torch.float32)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight, bias) if _native(weight.dtype) else widened_linear(x, weight, bias)


def keep_expert_weight(weight: torch.Tensor, isa: str) -> torch.Tensor:
    """Stand in for vLLM's cpu_prepack_moe_weight: no packing."""
    return weight


def _gated(activation: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[torch.Tensor], torch.Tensor]:
    def apply(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return activation(gate) * up

    return apply


def _swigluoai(x: torch.Tensor) -> torch.Tensor:
    """gpt-oss: gate and up interleaved, clamped at 7, sigmoid scaled by 1.702."""
    gate, up = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(min=-7.0, max=7.0)
    return (up + 1) * gate * torch.sigmoid(gate * 1.702)


_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": _gated(F.silu),
    "gelu": _gated(F.gelu),
    "gelu_tanh": _gated(lambda x: F.gelu(x, approximate="tanh")),
    "swigluoai": _swigluoai,
}


@torch.library.custom_op("delta_sync::plain_fused_moe", mutates_args=("out",))
def plain_fused_moe(
    out: torch.Tensor,
    x: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    w13_bias: torch.Tensor | None,
    w2_bias: torch.Tensor | None,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: str,
    skip_weighted: bool,
) -> None:
    """Mixture of experts over plain weights.

    x and out ``[tokens, hidden]``; w13 ``[experts, 2 * inner, hidden]``; w2 ``[experts, hidden, inner]``;
    topk_weights and topk_ids ``[tokens, k]``. Sums in float32 in expert order, so results do not depend on load.
    """
    act = _ACTIVATIONS[activation]
    total = torch.zeros(out.shape, dtype=torch.float32)
    for expert in torch.unique(topk_ids).tolist():
        if not 0 <= expert < w13.shape[0]:
            continue
        rows, slots = torch.where(topk_ids == expert)
        hidden = act(_linear(x[rows], w13[expert], None if w13_bias is None else w13_bias[expert]))
        y = _linear(hidden, w2[expert], None if w2_bias is None else w2_bias[expert]).float()
        total.index_add_(0, rows, y if skip_weighted else y * topk_weights[rows, slots, None].float())
    out.copy_(total)
