"""Modules that are served as vLLM's quantisation makes them: which bits they are made from, and making them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch

from delta_sync.dtypes import DTYPES
from delta_sync.errors import IntegrityError, MappingError
from vllm_delta_plugin.live_storage import SIGNED, LiveStorage
from vllm_delta_plugin.shadow import Shadow, signed
from vllm_delta_plugin.staged import Array, Index, StageBuilder
from vllm_delta_plugin.transfer import to_device

Process = Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]
Changes = Mapping[int, tuple[Index, Array]]  # storage number -> distinct elements, and the bits they get
_RAW = {1: DTYPES["F8_E4M3"], 2: DTYPES["F16"], 4: DTYPES["F32"]}  # by width, which is all that writing depends on
_SHARE = 8  # a scan makes one of so many modules again


@dataclass(frozen=True)
class Box:
    """A tensor that lies in a storage of the weight map: number, first element, shape, strides and element type."""

    storage: int
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, storage: int, tensor: torch.Tensor) -> Box:
        """The tensor's own place in its storage."""
        return cls(storage, int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride(), tensor.dtype)

    @property
    def span(self) -> int:
        """Elements from the first to the last, those between that are not the tensor's included."""
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))


@dataclass(frozen=True)
class Module:
    """``loaded``: what deltas change, shadows or (``untouched``) live; ``made``: what ``process`` makes of it."""

    name: str
    process: Process
    loaded: Mapping[str, Box]
    untouched: frozenset[str]
    made: Mapping[str, Box]


@dataclass
class Requantised:
    """All such modules of a rank; empty where weights are served as they are loaded."""

    shadow: Shadow = field(default_factory=Shadow)
    modules: list[Module] = field(default_factory=list)
    _next: int = 0  # module that the scan begins with

    def __bool__(self) -> bool:
        return bool(self.modules)

    @cached_property
    def staged_on_host(self) -> frozenset[int]:
        """Numbers of storages whose changes must be known to the host, since more is made of them."""
        return frozenset(box.storage for module in self.modules for box in module.loaded.values())

    def touched(self, builder: StageBuilder) -> list[Module]:
        """The modules of which something is staged."""
        return [m for m in self.modules if any(builder.changes_any(box.storage) for box in m.loaded.values())]

    def turn(self) -> list[Module]:
        """The modules that are this scan's turn."""
        return [self.modules[(self._next + i) % len(self.modules)] for i in range(self._share)]

    def next_turn(self) -> None:
        """What the scan found counts: after ``_SHARE`` of these every module was looked at."""
        self._next = (self._next + self._share) % max(1, len(self.modules))

    @property
    def _share(self) -> int:
        return -(-len(self.modules) // _SHARE)


def made_storage(owner: str, tensor: torch.Tensor) -> LiveStorage:
    """The storage under a tensor that vLLM made; MappingError if its elements are of a width that cannot be written."""
    width = tensor.element_size()
    if width not in _RAW:
        raise MappingError(f"parameter {owner!r}", expected="elements of 1, 2 or 4 bytes", got=str(tensor.dtype))
    storage = tensor.untyped_storage()
    bits = torch.empty(0, dtype=SIGNED[width], device=tensor.device)
    bits.set_(storage, 0, (storage.nbytes() // width,), (1,))
    return LiveStorage(owner, _RAW[width], bits)


def stage_made(builder: StageBuilder, modules: list[Module], check: Callable[[], None]) -> None:
    """Add to what is staged what it makes of the modules; IntegrityError if one cannot be made again."""
    for module in modules:
        check()
        changes = builder.changes(box.storage for box in module.loaded.values())
        for box, index, bits in differences(builder.weights.storages, module, changes):
            builder.add_made(box.storage, index, bits)


def differences(
    storages: list[LiveStorage], module: Module, changes: Changes
) -> list[tuple[Box, torch.Tensor, torch.Tensor]]:
    """Where what ``changes`` make of the module is not what is served: storage elements, and their bits.

    On the device of the module, one module's memory; complete on the current stream.
    """
    loaded = _loaded(storages, module, changes)
    expected = {name: loaded[name].clone() for name in module.untouched}
    made = module.process(loaded)
    for name, tensor in expected.items():
        if not torch.equal(_as_bits(made[name]), _as_bits(tensor)):
            raise _other(module, name, "as it is loaded, as it was at the start")
    out = []
    for name, box in module.made.items():
        if name not in made or (tuple(made[name].shape), made[name].dtype) != (box.shape, box.dtype):
            raise _other(module, name, f"{box.dtype} {list(box.shape)}")
        live = storages[box.storage].bits[box.offset : box.offset + box.span]
        new = live.clone()  # elements between the tensor's own stay what they are
        new.as_strided(box.shape, box.strides).copy_(_as_bits(made[name]))
        index = (new != live).nonzero().reshape(-1)
        if index.numel():
            out.append((box, index + box.offset, new[index]))
    return out


def write_made(storages: list[LiveStorage], module: Module) -> None:
    """Write what is made of the module over what is served; nothing may run on it meanwhile."""
    for box, index, bits in differences(storages, module, {}):
        storages[box.storage].bits[index] = bits


def _loaded(storages: list[LiveStorage], module: Module, changes: Changes) -> dict[str, torch.Tensor]:
    """The module's parameters with the changes, beside it on its device."""
    device = next((storages[box.storage].bits.device for box in module.made.values()), torch.device("cpu"))
    out = {}
    for name, box in module.loaded.items():
        storage = storages[box.storage]
        flat = to_device(signed(storage.array), device) if storage.on_cpu else storage.bits.clone()
        if box.storage in changes:
            index, bits = changes[box.storage]
            flat[to_device(index, device)] = to_device(signed(bits), device)
        out[name] = flat.view(box.dtype).as_strided(box.shape, box.strides, box.offset)
    return out


def _as_bits(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor of any strides seen as signed integers."""
    return tensor.view(SIGNED[tensor.element_size()])


def _other(module: Module, name: str, expected: str) -> IntegrityError:
    return IntegrityError(
        f"parameter {name!r} that vLLM makes of module {module.name!r}",
        expected=expected,
        got="another layout or other bits",
        remedy="serve the unquantised checkpoint, and report this",
    )
