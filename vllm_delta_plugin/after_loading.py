"""What vLLM does to loaded weights before it serves them: nothing, or what a map can follow, or a reason to refuse."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from vllm_delta_plugin.compat.process_seam import Unprocessed
from vllm_delta_plugin.coverage import Place, WeightMap
from vllm_delta_plugin.live_storage import live_storage
from vllm_delta_plugin.moved import follow

_ADAPTERS = {"lora_a_stacked", "lora_a_stacked_2d", "lora_b_stacked"}
_NOT_WEIGHTS = {"kv_cache", *_ADAPTERS}  # what vLLM hangs on modules after loading
_MIN_DERIVED = 64  # smallest new tensor that can be a copy of weights rather than a scale or a flag


@dataclass
class Fingerprint:
    """What a model is before post-processing: each parameter's place and layout, every tensor's digest on this rank."""

    places: dict[str, Place]
    sums: dict[str, int]
    loose: frozenset[str]
    sharing: frozenset[str]  # all that lies in memory that is mapped

    @classmethod
    def take(cls, model: torch.nn.Module, weights: WeightMap) -> Fingerprint:
        """Scan the model."""
        held = _held(weights)
        sharing = frozenset(name for name, memory in _memories(model).items() if memory in held)
        return cls(_places(model), weights.sums(), frozenset(_loose_tensors(model)), sharing)


def _places(model: torch.nn.Module) -> dict[str, Place]:
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {_without_lora(name): _place(tensor) for name, tensor in named}


def _memories(model: torch.nn.Module) -> dict[str, int]:
    """Of everything that modules hold, the address of the memory it lies in."""
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {n: t.untyped_storage().data_ptr() for n, t in [*named, *_loose_tensors(model).items()]}


def _without_lora(name: str) -> str:
    """A parameter's name before vLLM put its LoRA layer around its module."""
    return name.replace(".base_layer.", ".")


def _place(t: torch.Tensor) -> Place:
    return (t.untyped_storage().data_ptr(), t.data_ptr(), tuple(t.shape), t.stride(), t.dtype, t.device.type)


def _loose_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Floating tensors that modules keep outside parameters and buffers, large enough to be copies of weights."""
    out = {}
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute in _NOT_WEIGHTS or not isinstance(value, torch.Tensor):
                continue
            if value.is_floating_point() and value.numel() >= _MIN_DERIVED:
                out[_without_lora(f"{prefix}.{attribute}")] = value
    return out


def verify_direct(
    model: torch.nn.Module, weights: WeightMap, before: Fingerprint, modules: Mapping[str, Unprocessed]
) -> None:
    """Compare with ``before``: follow what ``modules`` had put elsewhere; the rest becomes an alias or a problem."""
    after = _places(model)
    moved = {name for name, place in before.places.items() if after.get(name) != place}
    owners = {weights.storages[i].owner: i for i in range(len(weights.storages))}
    replaced = set()
    for parameter in sorted(moved & set(owners)):
        if not _retied(parameter, owners, weights, after, moved):
            replaced.add(owners[parameter])
    _take_hold(model, weights, moved)
    follow(model, weights, modules, before.sums, {number for number in replaced if weights.tensors_in(number)})
    weights.places, weights.loose = after, before.loose
    _check_shared(model, weights, before)
    _check_loose(model, weights)
    _check_added(weights, before)


def _take_hold(model: torch.nn.Module, weights: WeightMap, moved: set[str]) -> None:
    """See the parameters that stayed where they were, of which ``let_go`` kept but the names."""
    named = dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])
    for number, storage in enumerate(weights.storages):
        if not storage.bits.numel() and storage.owner in named and storage.owner not in moved:
            weights.storages[number] = live_storage(storage.owner, named[storage.owner])


def _retied(
    parameter: str, owners: dict[str, int], weights: WeightMap, after: Mapping[str, Place], moved: set[str]
) -> bool:
    """vLLM may give a redundant head the embedding's memory after loading: its tensor then is an alias."""
    place = after.get(parameter)
    twin = next((o for o in owners if o not in moved and after.get(o) == place), None)
    if place is None or twin is None:
        return False
    for name in weights.tensors_in(owners[parameter]):
        original = next((n for n in weights.tensors_in(owners[twin]) if _same_boxes(weights, n, name)), None)
        if original is None:
            return False
        weights.aliases[name] = original
        weights.regions.pop(name)
        weights.tensors.pop(name)
    weights.storages[owners[parameter]] = weights.storages[owners[twin]]  # frees the redundant memory
    return True


def _same_boxes(weights: WeightMap, one: str, other: str) -> bool:
    def boxes(name: str) -> set[Place]:
        return {(r.shape, r.src_offset, r.src_strides, r.dst_offset, r.dst_strides) for r in weights.regions[name]}

    return weights.tensors[one] == weights.tensors[other] and boxes(one) == boxes(other)


def _elements(place: Place) -> int:
    shape = place[2]
    return math.prod(shape) if isinstance(shape, tuple) else 0


def _held(weights: WeightMap) -> set[int]:
    return {storage.bits.untyped_storage().data_ptr() for storage in weights.storages}


def _check_shared(model: torch.nn.Module, weights: WeightMap, before: Fingerprint) -> None:
    """Where a parameter was given other memory, whatever else lay in the old one is stale from the next version on."""
    held = _held(weights)
    for name, memory in _memories(model).items():
        if name in before.sharing and memory not in held:
            weights.problems.setdefault(name, "it is left in memory that vLLM replaced after loading")


def _check_loose(model: torch.nn.Module, weights: WeightMap) -> None:
    held = _held(weights)
    for name, tensor in _loose_tensors(model).items():
        if name not in weights.loose and tensor.untyped_storage().data_ptr() not in held:
            weights.problems.setdefault(name, "vLLM made it after loading, perhaps from weights: deltas leave it stale")


def _check_added(weights: WeightMap, before: Fingerprint) -> None:
    held = _held(weights)
    for name in sorted(set(weights.places) - set(before.places)):
        place = weights.places[name]
        if place[0] not in held and _elements(place) >= _MIN_DERIVED:
            weights.problems.setdefault(name, "post-processing adds it, so deltas would leave it stale")


def check_unmoved(model: torch.nn.Module, weights: WeightMap) -> None:
    """MappingError if, since loading, a mapped parameter moved or something new was made from weights."""
    now = _places(model)
    for storage in weights.storages:
        if now.get(storage.owner) != weights.places.get(storage.owner):
            weights.problems.setdefault(storage.owner, "the parameter was replaced after the model was loaded")
    _check_loose(model, weights)
    weights.check()
