"""Plain CPU kernels: they read weights where the checkpoint put them, so a delta written there is what is served.

vLLM's CPU backend repacks linear and expert weights into opaque buffers at load. Keeping them plain costs speed
(benchmarks/cpu_plain_weights.py measures it) and is the only way in which single elements can be replaced.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional as F


def use_plain_linear(layer: torch.nn.Module) -> None:
    """Stand in for vLLM's dispatch_cpu_unquantized_gemm: multiply with ``layer.weight`` itself, keep it."""
    layer.cpu_linear = F.linear  # type: ignore[assignment]


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
        hidden = act(F.linear(x[rows], w13[expert], None if w13_bias is None else w13_bias[expert]))
        y = F.linear(hidden, w2[expert], None if w2_bias is None else w2_bias[expert]).float()
        total.index_add_(0, rows, y if skip_weighted else y * topk_weights[rows, slots, None].float())
    out.copy_(total)
