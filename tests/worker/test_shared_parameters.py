"""A parameter that a quantised module holds with another, as experts hold a router's bias: a made-up method of fp8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.after_loading import Fingerprint, verify_direct
from vllm_delta_plugin.compat import fp8_seam
from vllm_delta_plugin.coverage import WeightMap, map_weights
from vllm_delta_plugin.quantised_load import add_shadows, finish
from vllm_delta_plugin.trace import trace_load

SHAPES = {"router.bias": (128,), "experts.weight": (16, 128)}


def rounded(layer: Any) -> None:
    layer.weight = torch.nn.Parameter(layer.weight.to(torch.float8_e4m3fn), requires_grad=False)


def narrowed_too(layer: Any) -> None:
    rounded(layer)
    layer.bias = torch.nn.Parameter(layer.bias.to(torch.bfloat16), requires_grad=False)


class Method:
    def __init__(self, process: Callable[[Any], None]) -> None:
        self.process_weights_after_loading = process


class Model(torch.nn.Module):
    def __init__(self, process: Callable[[Any], None]) -> None:
        super().__init__()
        self.router, self.experts = torch.nn.Module(), torch.nn.Module()
        self.router.bias = self.experts.bias = torch.nn.Parameter(torch.zeros(128), requires_grad=False)
        self.experts.weight = torch.nn.Parameter(torch.zeros(16, 128, dtype=torch.bfloat16), requires_grad=False)
        self.experts.quant_method = Method(process)

    def load_weights(self, weights: Any) -> set[str]:
        parameters = dict(self.named_parameters())
        for name, weight in weights:
            parameters[name].data.copy_(weight)
        return set(parameters)


def loaded(process: Callable[[Any], None], bias: float) -> tuple[Model, WeightMap]:
    """Mapped around its processing; the bias is there, or comes only once the experts' copy is made (online fp8)."""
    model = Model(process)
    quantised = {"experts": model.experts}
    fp8_seam.captured(model.experts)
    torch.nn.init.constant_(model.router.bias, bias)
    with fp8_seam.as_loaded(quantised):
        weights = map_weights(model, trace_load(model, SHAPES, torch.bfloat16), SHAPES)
    add_shadows(weights, quantised)
    before = Fingerprint.take(model, weights)
    process(model.experts)
    finish(weights, model, quantised, torch.bfloat16)
    verify_direct(model, weights, before, {})
    return model, weights


@pytest.mark.parametrize("bias", [0.0, 1.0])
def test_what_is_left_as_it_was_loaded_is_changed_where_the_other_has_it(bias: float) -> None:
    model, weights = loaded(rounded, bias)
    weights.check()
    (region,) = weights.regions["router.bias"]
    assert weights.storages[region.storage].bits.data_ptr() == model.router.bias.data_ptr()
    (module,) = weights.requantised.modules
    assert (module.loaded["bias"].storage, "bias" in module.untouched) == (region.storage, True)
    assert list(module.made) == ["weight"]


def test_what_is_transformed_is_refused_by_name() -> None:
    with pytest.raises(MappingError, match=r"'experts\.bias', expected memory of its own, got another parameter's"):
        loaded(narrowed_too, 0.0)
