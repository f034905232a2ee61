"""The followed map of a rearranging load against the load itself, done with numbers that name their positions."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import pytest
import torch

from vllm_delta_plugin.trace import trace_load

Change = Callable[[torch.Tensor], torch.Tensor]
SHAPE = (12, 8)
CHANGES: dict[str, Change] = {
    "transposed": lambda t: t.t().contiguous(),
    "a slice of it": lambda t: t.t().contiguous()[1:5, 2:9],
    "heads interleaved": lambda t: t.view(2, 2, 3, 8).transpose(1, 2).reshape(12, 8),
    "halves of heads": lambda t: t.view(2, 2, 3, 8).transpose(1, 2).reshape(12, 8)[6:],
    "twice": lambda t: t.view(3, 4, 8).permute(2, 0, 1).reshape(24, 4).t().reshape(8, 12),
    "split otherwise": lambda t: t.t().reshape(2, 4, 3, 4)[:, 1],
    "every second": lambda t: t.t().contiguous()[::2, ::3],
    "every second row of heads": lambda t: t.view(2, 6, 8).transpose(0, 1).reshape(12, 8)[::2],
    "permuted copy": lambda t: t.t().clone().t()[3:],
}
UNDESCRIBED: dict[str, Change] = {
    "split across rows": lambda t: t.t().reshape(4, 24).view(2, 2, 3, 8)[:, 1],
    "rows that cross heads": lambda t: t.view(2, 6, 8).transpose(0, 1).reshape(96)[8:40].view(4, 8)[:, 3:],
    "a window over transposed rows": lambda t: t.t().reshape(96)[5:25],
}


class Model(torch.nn.Module):
    """One parameter, and a loader that changes the tensor first."""

    def __init__(self, change: Change) -> None:
        super().__init__()
        self.change = change
        shape = change(torch.zeros(SHAPE)).shape
        self.w = torch.nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for _, tensor in weights:
            self.w.data.copy_(self.change(tensor))


@pytest.mark.parametrize("name", CHANGES)
def test_every_element_is_found_where_the_load_puts_it(name: str) -> None:
    model = Model(CHANGES[name])
    trace = trace_load(model, {"a": SHAPE}, torch.bfloat16)
    assert not trace.problems
    found = np.full(model.w.numel(), -1)
    for copy in trace.copies:
        places = np.full(copy.shape, copy.dst_offset)
        sources = np.full(copy.shape, copy.src_offset)
        for axis, index in enumerate(np.indices(copy.shape)):
            places += index * copy.dst_strides[axis]
            sources += index * copy.src_strides[axis]
        found[places] = sources
    model.load_weights([("a", torch.arange(96.0).view(SHAPE))])
    assert found.tolist() == model.w.reshape(-1).long().tolist()


@pytest.mark.parametrize("name", UNDESCRIBED)
def test_what_strides_do_not_describe_is_refused(name: str) -> None:
    trace = trace_load(Model(UNDESCRIBED[name]), {"a": SHAPE}, torch.bfloat16)
    assert "strides do not describe" in trace.problems["a"] and not trace.copies
