"""The float32 way to a bfloat16 product gives what correct rounding gives; run apart, since it changes the process."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import torch
torch.manual_seed(0)
torch.ops.mkldnn._is_mkldnn_bf16_supported = lambda: False  # as on a CPU without the instructions
from examples.wordle.cpu_bf16 import use_float32_products
assert use_float32_products() and use_float32_products()
a, b, c = torch.randn(7, 33).bfloat16(), torch.randn(33, 5).bfloat16(), torch.randn(5).bfloat16()
exact = a.double() @ b.double()
for got, want in [
    (a @ b, exact),
    (torch.addmm(c, a, b, beta=2, alpha=0.5), 2 * c.double() + 0.5 * exact),
    (torch.nn.functional.linear(a, b.t().contiguous(), c), c.double() + exact),
    (torch.bmm(a[None], b[None])[0], exact),
]:
    assert got.dtype is torch.bfloat16
    assert torch.equal(got, want.float().bfloat16()), (got.double() - want).abs().max()
x, w = torch.randn(4, 6, requires_grad=True), torch.randn(3, 6, requires_grad=True)
with torch.autocast("cpu", dtype=torch.bfloat16):
    torch.nn.functional.linear(x, w).float().sum().backward()
assert torch.allclose(x.grad, w.sum(0).expand(4, 6), rtol=0.02, atol=0.02)
assert torch.equal(torch.ones(2, 2) @ torch.ones(2, 2), torch.full((2, 2), 2.0))
print("exact")
"""


def test_products_are_correctly_rounded() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120, check=False)
    assert run.stdout.strip() == "exact", run.stderr[-2000:]
