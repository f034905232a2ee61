"""The least that a commit could be on this card: a kernel that writes the same elements, and reads none of them."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 256


def write_alone(addresses: torch.Tensor, bits: torch.Tensor) -> None:
    """Write ``bits`` (int16 ``[n]``) to as many absolute addresses (int64 ``[n]``): a commit's traffic, less its reads.

    What is there afterwards is of no use.
    """
    _write[(triton.cdiv(bits.numel(), _BLOCK),)](addresses, bits, bits.numel(), BLOCK=_BLOCK, num_warps=8)


@triton.jit(do_not_specialize=["count"])
def _write(addresses, bits, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < count
    address = tl.load(addresses + at, mask=mask, other=0)
    tl.store(address.to(bits.dtype), tl.load(bits + at, mask=mask, other=0), mask=mask)
