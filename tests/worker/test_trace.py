"""Following loaders of every manner: plain copies are mapped, everything else is refused by tensor and reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.after_loading import Fingerprint, check_unmoved, verify_direct
from vllm_delta_plugin.coverage import WeightMap, add_tied_names, map_weights
from vllm_delta_plugin.trace import trace_load

Loader = Callable[[torch.nn.Module, str, torch.Tensor], None]
SHAPE = {"a": (6, 8), "b": (6, 8)}


class Model(torch.nn.Module):
    """One fused bfloat16 parameter ``w`` ``[12, 8]``; ``load(self, name, tensor)`` loads each tensor."""

    def __init__(self, load: Loader) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.w = torch.nn.Parameter(torch.randn(12, 8).to(torch.bfloat16), requires_grad=False)
        self.other = torch.nn.Parameter(torch.randn(6, 8).to(torch.float16), requires_grad=False)
        self._load = load

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self._load(self, name, tensor)


def rows(model: torch.nn.Module, name: str) -> torch.Tensor:
    return model.w.data[:6] if name == "a" else model.w.data[6:]


def traced(load: Loader) -> tuple[Model, WeightMap]:
    model = Model(load)
    before = model.w.clone()
    weights = map_weights(model, trace_load(model, SHAPE, torch.bfloat16), SHAPE)
    assert torch.equal(model.w, before), "tracing must not write"
    return model, weights


def plain(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).copy_(tensor)


def test_plain_copies_are_mapped() -> None:
    _, weights = traced(plain)
    weights.check()
    assert {n: [(r.dst_offset, r.numel) for r in rs] for n, rs in weights.regions.items()} == {
        "a": [(0, 48)],
        "b": [(48, 48)],
    }
    assert (weights.tensors["a"].dtype.name, weights.tensors["a"].shape) == ("BF16", (6, 8))


def test_slices_transposes_and_list_copies_are_mapped() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "a":  # columns of a transposed view, one half at a time
            target = rows(model, name).view(8, 6)
            for half in range(2):
                target[half * 4 : half * 4 + 4].copy_(tensor.t().narrow(0, half * 4, 4))
        else:
            torch._foreach_copy_(list(rows(model, name).unbind()), list(tensor.unbind()))

    _, weights = traced(load)
    weights.check()
    assert [(r.shape, r.src_strides) for r in weights.regions["a"]] == [((6, 4), (8, 1)), ((6, 4), (8, 1))]
    assert len(weights.regions["b"]) == 6


def test_copies_of_checkpoint_tensors_are_followed() -> None:
    """What gpt-oss does to its experts: transposed, made contiguous, written."""

    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        rows(model, name).view(8, 6).copy_(tensor.t().contiguous())

    _, weights = traced(load)
    weights.check()
    assert [(r.shape, r.src_strides, r.dst_strides) for r in weights.regions["a"]] == [((6, 8), (8, 1), (1, 6))]


def test_unread_tensors_are_listed() -> None:
    _, weights = traced(lambda model, name, tensor: plain(model, name, tensor) if name == "a" else None)
    weights.check()
    assert weights.ignored == ["b"] and "b" in weights.known


class Partly(torch.nn.Module):
    """A loader that forgets the head's bias, as vLLM's does for Phi-2, and leaves out all of a draft's head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(8, 6, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "head.weight":
                self.head.weight.data.copy_(tensor)


def test_a_module_that_is_loaded_in_part_is_refused_and_one_that_is_left_out_is_not() -> None:
    shapes = {"head.weight": (6, 8), "head.bias": (6,), "mtp.head.weight": (6, 8), "mtp.head.bias": (6,)}
    model = Partly()
    weights = map_weights(model, trace_load(model, shapes, torch.bfloat16), shapes)
    assert weights.ignored == ["head.bias", "mtp.head.weight", "mtp.head.bias"]
    with pytest.raises(MappingError, match=r"'head.bias' \(one of 1 .* leaves it out.*loader reads that tensor"):
        weights.check()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_bias_that_one_rank_adds_for_all_is_a_constant_on_the_others(rank: int) -> None:
    """What gpt-oss does to its experts' bias."""
    model = Partly()

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name == "head.bias" and rank:
                tensor.zero_()
            model.get_parameter(name).data.copy_(tensor)

    model.load_weights = load  # type: ignore[method-assign, assignment]
    shapes = {"head.weight": (6, 8), "head.bias": (6,)}
    weights = map_weights(model, trace_load(model, shapes, torch.bfloat16), shapes)
    weights.check()
    assert weights.ignored == ["head.bias"] * rank
    assert set(weights.regions) == {"head.weight", "head.bias"} - set(weights.ignored)


def test_a_tensor_of_which_a_part_is_replaced_is_refused() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        if name == "b":
            tensor[3:].zero_()
        plain(model, name, tensor)

    _, weights = traced(load)
    assert "changed by aten.zero_" in weights.problems["b"]


def test_constants_written_by_the_loader_are_left_alone() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        rows(model, name).copy_(tensor)
        model.other.data[3:].zero_()
        model.other.data[:3].copy_(torch.ones(3, 8))

    _, weights = traced(load)
    weights.check()


def scaled(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).copy_(tensor * 2)


def added(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).add_(tensor)


def changed_first(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).copy_(tensor.add_(1))


def overwritten_first(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    tensor[0] = torch.ones(8)
    rows(model, name).copy_(tensor)


def widened_first(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).copy_(tensor.float())


def buffered(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    buffer = torch.empty(6, 8, dtype=torch.bfloat16)
    buffer.copy_(tensor)
    rows(model, name).copy_(buffer)


def looked_at(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    if tensor.sum().item() > 0:
        plain(model, name, tensor)


def broadcast(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    rows(model, name).copy_(tensor[0])


def twice(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    model.w.data[:6].copy_(tensor)


def two_types(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
    plain(model, name, tensor)
    model.other.data.copy_(tensor)


@pytest.mark.parametrize(
    ("load", "reason"),
    [
        (scaled, "transformed by aten.mul"),
        (added, "written by aten.add_"),
        (changed_first, "changed by aten.add_"),
        (overwritten_first, "changed by aten.copy_"),
        (widened_first, "transformed by aten._to_copy"),
        (buffered, "transformed by aten.copy_"),
        (looked_at, "needs its values.*without --enable-expert-parallel"),
        (broadcast, "reads each checkpoint element once"),
        (twice, "loaded twice"),
        (two_types, "one element type"),
    ],
)
def test_anything_else_is_refused_by_name(load: Loader, reason: str) -> None:
    _, weights = traced(load)
    with pytest.raises(MappingError, match=f"'a'.*{reason}"):
        weights.check()


def test_quantised_parameters_are_refused() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        model.packed.data[:6].copy_(tensor)

    model = Model(load)
    model.packed = torch.nn.Parameter(torch.zeros(12, 8, dtype=torch.int8), requires_grad=False)
    weights = map_weights(model, trace_load(model, SHAPE, torch.bfloat16), SHAPE)
    with pytest.raises(MappingError, match=r"packed.*int8"):
        weights.check()


def replaced(model: Model) -> None:
    model.w = torch.nn.Parameter(model.w.clone(), requires_grad=False)


def permuted(model: Model) -> None:
    model.w.data.copy_(model.w.data.flip(0))


def retyped(model: Model) -> None:
    model.w.data = model.w.data.float()


def derived(model: Model) -> None:
    model.cache = model.w.data.t().contiguous()


def registered(model: Model) -> None:
    model.register_buffer("packed", model.w.data.clone())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (replaced, "'w' is replaced after loading"),
        (permuted, "transformed in place after loading"),
        (retyped, "'w' is replaced after loading"),
        (derived, r"cache.*stale"),
        (registered, r"packed.*stale"),
    ],
)
def test_post_processing_that_moves_weights_is_refused(change: Callable[[Model], None], reason: str) -> None:
    model, weights = traced(plain)
    before = Fingerprint.take(model, weights)
    change(model)
    verify_direct(model, weights, before, {})
    with pytest.raises(MappingError, match=reason):
        weights.check()


def test_what_happens_after_loading_is_seen_at_attach() -> None:
    for change, reason in ((replaced, "replaced after the model was loaded"), (derived, r"cache.*stale")):
        model, weights = traced(plain)
        verify_direct(model, weights, Fingerprint.take(model, weights), {})
        check_unmoved(model, weights)
        change(model)
        with pytest.raises(MappingError, match=reason):
            check_unmoved(model, weights)


def test_a_head_that_is_tied_after_loading_is_an_alias_and_frees_its_memory() -> None:
    def load(model: torch.nn.Module, name: str, tensor: torch.Tensor) -> None:
        (model.embed if name == "embed" else model.head).data.copy_(tensor)

    model = Model(load)
    model.embed = torch.nn.Parameter(torch.randn(6, 8).to(torch.bfloat16), requires_grad=False)
    model.head = torch.nn.Parameter(model.embed.clone(), requires_grad=False)
    shapes = {"embed": (6, 8), "head": (6, 8)}
    weights = map_weights(model, trace_load(model, shapes, torch.bfloat16), shapes)
    before = Fingerprint.take(model, weights)
    model.head = model.embed
    verify_direct(model, weights, before, {})
    add_tied_names(model, weights)
    weights.check()
    assert weights.aliases == {"head": "embed"} and set(weights.regions) == {"embed"}
    assert len({storage.bits.data_ptr() for storage in weights.storages}) == 1
