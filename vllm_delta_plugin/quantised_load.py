"""While a quantised model is loaded: which of its bits are kept in host memory, and what is made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from delta_sync.errors import DeltaSyncError, IntegrityError, MappingError
from vllm_delta_plugin.compat import fp8_seam
from vllm_delta_plugin.compat.mla_seam import Reader, readers
from vllm_delta_plugin.compat.process_seam import parameters_of
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_storage import LiveStorage, live_storage
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


def finish(weights: WeightMap, model: torch.nn.Module, modules: Modules, dtype: torch.dtype) -> None:
    """Once vLLM has processed them: drop the copies of what it left alone, and prove that the rest can be made again.

    ``dtype``: the model's. MappingError or IntegrityError if a module cannot be followed.
    """
    requantised, reading = weights.requantised, readers(model, set(modules.values()), dtype)
    assert requantised is not None
    twice = fp8_seam.held_twice(model, modules)
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
        reader = reading.get(module)
        try:
            loaded, untouched = _loaded(weights, name, module)
            if shared := [part for part in loaded if part not in untouched and (name, part) in twice]:
                raise _not_its_own(f"{name}.{shared[0]}")  # deltas may change the other, of which this is not made
            if untouched == frozenset(loaded) and reader is None:
                continue
            made = _made(weights, _served(name, module, untouched, reader))
            found = Module(name, _processor(module, reader), loaded, untouched, made)
            with _as_when_staging():
                again = differences(weights.storages, found, {})
        except DeltaSyncError:
            raise
        except Exception as error:  # foreign code may expect what a scratch module lacks, or more memory than there is
            raise MappingError(
                f"weights of module {name!r}",
                expected="processed once more",
                got=f"{type(error).__name__}: {error}",
                remedy="serve the unquantised checkpoint, or attention with another --attention-backend",
            ) from error
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


def _processor(module: torch.nn.Module, reader: Reader | None) -> Process:
    method = module.quant_method  # vLLM may put another in its place later

    def process(loaded: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        scratch = fp8_seam.process(module, method, loaded)
        made = parameters_of(scratch)
        if reader is not None:
            made |= {f"{reader.name}.{part}": tensor for part, tensor in reader.make(scratch).items()}
        return made

    return process


def _loaded(weights: WeightMap, name: str, module: torch.nn.Module) -> tuple[dict[str, Box], frozenset[str]]:
    """Where each parameter of the module is as it was loaded, and which of these places are live."""
    numbers = _numbers(weights)
    loaded, untouched = {}, set()
    for part, copy in fp8_seam.captured(module).parameters.items():
        number = numbers[copy.untyped_storage().data_ptr()]
        loaded[part] = Box.of(number, copy)
        live = module._parameters.get(part)
        if live is None:
            continue
        elsewhere = numbers.get(live.untyped_storage().data_ptr())
        if elsewhere is not None:  # another module's too (a router's bias), which deltas change there
            if weights.tensors_in(number):
                raise _not_its_own(f"{name}.{part}")
            loaded[part] = Box.of(elsewhere, live)
            weights.storages[number] = weights.storages[elsewhere]
            untouched.add(part)
        elif _same(live, copy):
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


def _served(
    name: str, module: torch.nn.Module, untouched: frozenset[str], reader: Reader | None
) -> dict[str, tuple[str, torch.Tensor]]:
    """What was made of the module, of itself and of its reader, each with its owner's name."""
    own = parameters_of(module)
    found = {part: (f"{name}.{part}", tensor) for part, tensor in own.items() if part not in untouched}
    if reader is not None:
        parts = [(f"{reader.name}.{part}", getattr(reader.module, part)) for part in reader.make(module)]
        found |= {owner: (owner, tensor) for owner, tensor in parts}
    return found


def _made(weights: WeightMap, served: Mapping[str, tuple[str, torch.Tensor]]) -> dict[str, Box]:
    """Their places in storages that are added; MappingError where one would be written twice: a commit flips bits."""
    known, numbers = len(weights.storages), _numbers(weights)
    made: dict[str, Box] = {}
    for part, (owner, tensor) in served.items():
        address = tensor.untyped_storage().data_ptr()
        if address not in numbers:
            weights.storages.append(made_storage(owner, tensor))
            numbers[address] = len(weights.storages) - 1
        made[part] = Box.of(numbers[address], tensor)
        storage = weights.storages[numbers[address]]
        shared = [box for box in made.values() if box.storage == numbers[address]]
        alike = storage.bits.element_size() == tensor.element_size()
        if numbers[address] < known or not alike or (len(shared) > 1 and _overlap(storage, shared)):
            raise _not_its_own(owner)
    return made


def _not_its_own(owner: str) -> MappingError:
    return MappingError(f"parameter {owner!r}", expected="memory of its own", got="another parameter's")


def _overlap(storage: LiveStorage, boxes: Sequence[Box]) -> bool:
    times = torch.zeros_like(storage.bits, dtype=torch.int8)
    for box in boxes:
        times.as_strided(box.shape, box.strides, box.offset).add_(1)
    return bool((times > 1).any())


def _numbers(weights: WeightMap) -> dict[int, int]:
    """Storage numbers by address, the first of each: there the map puts what deltas change."""
    numbered = reversed(list(enumerate(weights.storages)))
    return {storage.bits.untyped_storage().data_ptr(): i for i, storage in numbered}
