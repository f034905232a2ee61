"""Seam: the convolutions of gated delta nets on CPUs that multiply bfloat16 (tried with vLLM 0.32).

vLLM packs their weights at load and tells its kernels so. The kernels take plain ones too, and pack them at each call,
some ten thousand elements a layer. All that calls them does so by way of ``vllm._custom_ops``; a kernel that is not
told would take plain weights for packed ones (tests/worker/test_cpu_convolutions.py looks at the answers).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

_KERNELS = ("causal_conv1d_fwd_cpu", "causal_conv1d_update_cpu")
_MARK = "__delta_sync_wraps__"


def install() -> None:
    """Let the kernels know that weights are plain; does nothing where this vLLM has none that could be told."""
    from vllm import _custom_ops as ops

    for name in _KERNELS:
        original = getattr(ops, name, None)
        if original is None or getattr(original, _MARK, False):
            continue
        if {"weight", "is_weight_packed"} <= set(inspect.signature(original).parameters):
            setattr(ops, name, _told(original))


def reads_plain(weight: torch.Tensor) -> bool:
    """Whether ``weight`` is such a convolution's, ``[channels, 1, width]``, and this vLLM's kernels take it plain."""
    from vllm import _custom_ops as ops

    told = all(getattr(getattr(ops, name, None), _MARK, False) for name in _KERNELS)
    return told and weight.ndim == 3 and weight.shape[1] == 1


def _told(original: Callable[..., Any]) -> Callable[..., Any]:
    signature = inspect.signature(original)

    @functools.wraps(original)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        weight = given["weight"]
        if weight.ndim == 3:  # as it was loaded; packed ones, and those that were never to be packed, have two
            given |= {"weight": weight.view(weight.shape[0], weight.shape[2]), "is_weight_packed": False}
        return original(**given)

    setattr(kernel, _MARK, True)
    return kernel
