"""While a quantised model is loaded: which of its bits are kept in host memory, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from delta_sync.errors import IntegrityError, MappingError
from vllm_delta_plugin.compat import fp8_seam
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_storage import live_storage
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.requantised import Box, Module, Process, Requantised, differences, made_storage
from vllm_delta_plugin.shadow import ShadowStorage, shadow_bytes

Modules = Mapping[str, torch.nn.Module]


def add_shadows(weights: WeightMap, modules: Modules) -> None:
    """Give the copies of the modules' parameters, some of them in the map already, storages of their own kind."""
    numbers = _numbers(weights)
    requantised = Requantised()
    for name, module in modules.items():
        for part, tensor in fp8_seam.captured(module).parameters.items():
            owner, address = f"{name}.{part}", tensor.untyped_storage().data_ptr()
            if address not in numbers:  # not in the checkpoint
                weights.storages.append(live_storage(owner, tensor))
                numbers[address] = len(weights.storages) - 1
            plain = weights.storages[numbers[address]]
            shadow = ShadowStorage(owner, plain.dtype, plain.bits, requantised.shadow)
            weights.storages[numbers[address]] = shadow
    weights.requantised = requantised


def finish(weights: WeightMap, modules: Modules) -> None:
    """Once vLLM has processed them: drop the copies of what it left alone, and prove that the rest can be made again.

    MappingError or IntegrityError if a module cannot be followed.
    """
    requantised = weights.requantised
    assert requantised is not None
    for name, module in modules.items():
        if not fp8_seam.captured(module).alone:
            raise MappingError(
                f"weights of module {name!r}",
                expected="a scale that this rank's part of the weights gives",
                got="one that vLLM finds over all ranks",
                remedy="serve with --tensor-parallel-size 1, or the unquantised checkpoint",
            )
        if (part := fp8_seam.derived(module, module.quant_method)) is not None:
            raise MappingError(
                f"weights of module {name!r}",
                expected="a kernel that computes with its parameters",
                got=f"{part}, which vLLM derives from them",
                remedy="serve with --moe-backend triton",
            )
        loaded, untouched = _loaded(weights, name, module)
        if untouched == frozenset(loaded):
            continue
        made = _made(weights, name, module, untouched)
        found = Module(name, _processor(module), loaded, untouched, made)
        with _as_when_staging():
            again = differences(weights.storages, found, {})
        if again:
            raise IntegrityError(
                f"what vLLM makes of module {name!r}",
                expected="the same bits each time",
                got="other bits",
                remedy="serve the unquantised checkpoint, and report this",
            )
        requantised.modules.append(found)
    if not requantised:
        weights.requantised = None
        return
    logger.info(
        "delta sync: %d modules are served as vLLM quantises them; their own weights take %d bytes of host memory",
        len(requantised.modules),
        shadow_bytes(weights.storages),
    )


@contextmanager
def _as_when_staging() -> Iterator[None]:
    """Meanwhile torch's default type is not the model's, as it is while vLLM loads: no function may depend on it."""
    loading = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(loading)


def _processor(module: torch.nn.Module) -> Process:
    method = module.quant_method  # vLLM may put another in its place later
    return lambda loaded: fp8_seam.process(module, method, loaded)


def _loaded(weights: WeightMap, name: str, module: torch.nn.Module) -> tuple[dict[str, Box], frozenset[str]]:
    """Where each parameter of the module is as it was loaded, and which of these places are live."""
    numbers = _numbers(weights)
    loaded, untouched = {}, set()
    for part, copy in fp8_seam.captured(module).parameters.items():
        number = numbers[copy.untyped_storage().data_ptr()]
        loaded[part] = Box.of(number, copy)
        live = module._parameters.get(part)
        if live is not None and _same(live, copy):
            untouched.add(part)
            weights.storages[number] = live_storage(f"{name}.{part}", live)
    for part in untouched:
        fp8_seam.release(module, part)
    return loaded, frozenset(untouched)


def _same(live: torch.Tensor, copy: torch.Tensor) -> bool:
    """Whether a parameter lies as it was loaded, and nothing else in its storage, with the same bits."""
    layout = [(t.shape, t.stride(), t.dtype, t.storage_offset(), t.untyped_storage().nbytes()) for t in (live, copy)]
    if layout[0] != layout[1]:
        return False
    return torch.equal(live.detach().cpu().view(torch.uint8), copy.detach().view(torch.uint8))


def _made(weights: WeightMap, name: str, module: torch.nn.Module, untouched: frozenset[str]) -> dict[str, Box]:
    numbers, made = _numbers(weights), {}
    for part, tensor in module._parameters.items():
        if tensor is None or part in untouched:
            continue
        owner, address = f"{name}.{part}", tensor.untyped_storage().data_ptr()
        if address in numbers:  # a commit would flip its bits twice
            raise MappingError(f"parameter {owner!r}", expected="memory of its own", got="another parameter's")
        weights.storages.append(made_storage(owner, tensor))
        numbers[address] = len(weights.storages) - 1
        made[part] = Box.of(numbers[address], tensor)
    return made


def _numbers(weights: WeightMap) -> dict[int, int]:
    """Storage numbers by address."""
    return {storage.bits.untyped_storage().data_ptr(): i for i, storage in enumerate(weights.storages)}
