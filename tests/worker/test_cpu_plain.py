"""The plain CPU kernels against the same arithmetic in float64."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from vllm_delta_plugin import cpu_plain


def rounded(exact: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return exact.to(like.dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 40), (5, 40), (2, 3, 40)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_widened_linear_rounds_the_exact_product(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...], with_bias: bool
) -> None:
    monkeypatch.setattr(cpu_plain, "_CHUNK", 200)  # several blocks, the last one shorter
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn(33, 40, generator=generator).to(dtype)
    bias = torch.randn(33, generator=generator).to(dtype) if with_bias else None
    out = cpu_plain.widened_linear(x, weight, bias)
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert out.shape == exact.shape and out.dtype == dtype
    torch.testing.assert_close(out, rounded(exact, out), rtol=2**-7, atol=1e-2)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
@pytest.mark.parametrize("skip_weighted", [False, True])
def test_experts_sum_to_the_weighted_mixture(activation: str, skip_weighted: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    tokens, hidden, inner, experts, k = 7, 16, 12, 4, 2
    x = torch.randn(tokens, hidden, generator=generator)
    w13 = torch.randn(experts, 2 * inner, hidden, generator=generator) * 0.2
    w2 = torch.randn(experts, hidden, inner, generator=generator) * 0.2
    weights, ids = torch.randn(tokens, experts, generator=generator).softmax(-1).topk(k)
    out = torch.empty_like(x)
    cpu_plain.plain_fused_moe(out, x, w13, w2, None, None, weights, ids.int(), activation, skip_weighted)

    expected = torch.zeros_like(x)
    for token in range(tokens):
        for slot in range(k):
            expert = int(ids[token, slot])
            inside = cpu_plain._ACTIVATIONS[activation](w13[expert] @ x[token])
            expected[token] += (w2[expert] @ inside) * (1 if skip_weighted else weights[token, slot])
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)


def test_activations_are_vllms() -> None:
    from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul

    x = torch.randn(5, 24, generator=torch.Generator().manual_seed(2)) * 4
    torch.testing.assert_close(cpu_plain._ACTIVATIONS["silu"](x), SiluAndMul.forward_native(x))
    gate_up = SwigluOAIAndMul.forward_native(type("Limits", (), {"alpha": 1.702, "limit": 7.0})(), x)
    torch.testing.assert_close(cpu_plain._ACTIVATIONS["swigluoai"](x), gate_up)


def test_room_that_was_made_in_inference_mode_serves_outside_too() -> None:
    x, weight = torch.ones(5, 24, dtype=torch.bfloat16), torch.ones(7, 24, dtype=torch.bfloat16)
    cpu_plain._scratch.cache_clear()
    with torch.inference_mode():
        inside = cpu_plain.widened_linear(x, weight)
    assert torch.equal(cpu_plain.widened_linear(x, weight), inside)


def test_layers_multiply_with_the_live_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    for native in (True, False):
        monkeypatch.setattr(cpu_plain, "_native", lambda dtype, native=native: native)
        layer = torch.nn.Linear(8, 6, bias=False, dtype=torch.bfloat16)
        cpu_plain.use_plain_linear(layer)
        x = torch.ones(5, 8, dtype=torch.bfloat16)
        before = layer.cpu_linear(x, layer.weight, None)
        with torch.no_grad():
            layer.weight[3, 2] += 1
        changed = layer.cpu_linear(x, layer.weight, None) != before
        assert changed[:, 3].all() and not changed[:, [0, 1, 2, 4, 5]].any()


class Engine:
    """Reads one prompt a step, a second each, beside which it decodes what it can, at a tenth of a second a step."""

    def __init__(self) -> None:
        self.now, self.waiting, self.made, self.wanted = 0.0, [], {}, 0

    def add_request(self, name: str, prompt: object, sampling: SimpleNamespace) -> None:
        self.waiting.append(name)
        self.wanted = sampling.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.waiting) or any(made < self.wanted for made in self.made.values())

    def step(self) -> list[SimpleNamespace]:
        self.now += 1.0 if self.waiting else 0.1
        running = [name for name, made in self.made.items() if made < self.wanted]
        for name in [*running, *self.waiting[:1]]:
            self.made[name] = self.made.get(name, 0) + 1
        self.waiting = self.waiting[1:]
        return [
            SimpleNamespace(request_id=name, outputs=[SimpleNamespace(token_ids=[0] * made)])
            for name, made in self.made.items()
        ]


@pytest.mark.parametrize("streams", [1, 8])
def test_the_benchmark_counts_no_prompt_as_decoding(monkeypatch: pytest.MonkeyPatch, streams: int) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import cpu_plain_weights as benchmark

    engine = Engine()
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: engine.now)
    prefill, decode = benchmark.speed(engine, streams, 64)
    assert prefill == pytest.approx(benchmark.PROMPT)
    made = sum(range(64 - streams, 64))  # by all streams, once the last has its first token
    assert decode == pytest.approx(made / (63 * 0.1))
