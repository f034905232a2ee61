"""Matrix products in bfloat16 on a CPU that has no instructions for them.

There PyTorch falls back to plain loops: a step of SmolLM2-135M takes minutes. Computing the same product in float32
and rounding its result to bfloat16 is what the instructions do too, and runs at the float32 library's speed.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch

_registered: list[torch.library.Library] = []  # PyTorch forgets an implementation whose library is collected


def use_float32_products() -> bool:
    """Compute CPU bfloat16 products in float32 for the rest of this process; False where the CPU needs no help."""
    if _registered or torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return bool(_registered)
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # overriding is the point
        library.impl("mm", _product(torch.ops.aten.mm.out), "CPU")
        library.impl("bmm", _product(torch.ops.aten.bmm.out), "CPU")
        library.impl("addmm", _added, "CPU")
    _registered.append(library)
    return True


def _product(into: Callable[..., torch.Tensor]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """mm or bmm through its ``out`` variant, which is not overridden."""

    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        x, y = (a.float(), b.float()) if a.dtype is torch.bfloat16 else (a, b)
        return into(x, y, out=x.new_empty((*x.shape[:-1], y.shape[-1]))).to(a.dtype)

    return product


def _added(bias: torch.Tensor, a: torch.Tensor, b: torch.Tensor, *, beta: float = 1, alpha: float = 1) -> torch.Tensor:
    x, y, z = (t.float() if t.dtype is torch.bfloat16 else t for t in (bias, a, b))
    out = y.new_empty((y.shape[0], z.shape[1]))
    return torch.ops.aten.addmm.out(x, y, z, beta=beta, alpha=alpha, out=out).to(a.dtype)
