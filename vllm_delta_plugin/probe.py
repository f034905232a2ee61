"""Where vLLM's processing puts each element of a module's weights, found by processing numbers in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from delta_sync.errors import DeltaSyncError, MappingError
from vllm_delta_plugin.compat.process_seam import Unprocessed
from vllm_delta_plugin.live_storage import SIGNED
from vllm_delta_plugin.transfer import to_host

_CHUNK = 1 << 24  # elements that are worked on at once
WHAT = "what vLLM makes of it"
Form = tuple[object, ...]
Numbers = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Served:
    """A parameter that is served: its first place, the one after its last, and how it lies in its memory."""

    begin: int
    end: int
    form: Form


@dataclass(frozen=True)
class Layout:
    """``where``, integers ``[n]``: of each loaded element, counted from ``first[parameter]``, the place that serves it.

    -1: nowhere.
    """

    first: Mapping[str, int]
    served: Mapping[str, Served]
    where: npt.NDArray[Any]


def form(tensor: torch.Tensor) -> Form:
    """How a tensor lies in its memory: shape, strides, offset, element type, bytes of the memory."""
    size = tensor.untyped_storage().nbytes()
    return (tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, size)


def probe(module: Unprocessed, width: int, device: torch.device) -> Layout:
    """Find it for parameters of ``width`` bytes an element, on ``device``; MappingError if elements are not just moved.

    Elements are numbered from 1; a number that needs more bits than an element has goes in several passes. One more
    pass, of other bits, proves that bits are only moved. What is in no place loaded must be zero: padding.
    """
    try:
        return _probe(module, width, device)
    except DeltaSyncError:
        raise
    except Exception as error:  # foreign code may expect weights, or more memory than there is
        got = f"{type(error).__name__}: {error}"
        raise MappingError(WHAT, expected="processed once more, with numbers for weights", got=got) from error


def _probe(module: Unprocessed, width: int, device: torch.device) -> Layout:
    first, total = {}, 0
    for name, parameter in module.parameters.items():
        if parameter.element_size() == width:
            first[name], total = total, total + parameter.numel()
    if not module.whole:
        raise MappingError(WHAT, expected="parameters that lie row-major in memory of their own", got="others")
    kind = torch.int32 if total < 2**31 else torch.int64
    origin = torch.zeros(0, dtype=kind, device=device)
    for shift in range(0, total.bit_length(), 8 * width):
        digits, _ = _served(_made(module, device, first, partial(_digit, shift=shift)), width)
        if not shift:
            origin = torch.zeros(digits.shape, dtype=kind, device=device)
        for part in _chunks(digits):
            origin[part] |= (digits[part].to(torch.int64) & ((1 << 8 * width) - 1)).to(kind) << shift
        del digits
    moved, served = _served(_made(module, device, first, _scrambled), width)
    for part in _chunks(moved):
        expected = _scrambled(origin[part]).to(moved.dtype)
        if not torch.equal(moved[part], torch.where(origin[part] == 0, 0, expected)) or int(origin[part].max()) > total:
            raise MappingError(WHAT, expected="elements put elsewhere", got="other elements")
    del moved
    where = torch.full((total + 1,), -1, dtype=kind, device=device)
    for part in _chunks(origin):
        where[origin[part].long()] = torch.arange(part.start, part.stop, dtype=kind, device=device)
    where = where[1:]
    if int((where >= 0).sum()) != int((origin > 0).sum()):
        raise MappingError(WHAT, expected="each element once", got="some several times")
    return Layout(first, served, to_host(where))


def _digit(numbers: torch.Tensor, shift: int) -> torch.Tensor:
    return numbers >> shift


def _scrambled(numbers: torch.Tensor) -> torch.Tensor:
    return (numbers.long() * 0x9E3779B1) >> 9


def _chunks(flat: torch.Tensor) -> Iterator[slice]:
    for start in range(0, flat.numel(), _CHUNK):
        yield slice(start, min(start + _CHUNK, flat.numel()))


def _made(module: Unprocessed, device: torch.device, first: Mapping[str, int], of: Numbers) -> dict[str, torch.Tensor]:
    """What vLLM makes of parameters whose elements' bits are ``of`` their numbers; those without numbers are zero."""
    loaded = {}
    for name, parameter in module.parameters.items():
        loaded[name] = torch.zeros(parameter.shape, dtype=parameter.dtype, device=device)
        if name not in first:
            continue
        flat = loaded[name].view(-1).view(SIGNED[parameter.element_size()])
        for part in _chunks(flat):
            begin = first[name] + 1
            flat[part] = of(torch.arange(begin + part.start, begin + part.stop, device=device)).to(flat.dtype)
    return module.process(loaded)


def _served(made: Mapping[str, torch.Tensor], width: int) -> tuple[torch.Tensor, dict[str, Served]]:
    """The bits of all memory of elements of that width, one memory after the other, and what lies where in them."""
    parts: dict[int, tuple[int, torch.Tensor]] = {}
    served, end = {}, 0
    for name, tensor in made.items():
        storage = tensor.untyped_storage()
        if tensor.element_size() != width or not storage.nbytes():
            continue
        if storage.data_ptr() not in parts:
            flat = torch.empty(0, dtype=SIGNED[width], device=tensor.device)
            parts[storage.data_ptr()] = end, flat.set_(storage, 0, (storage.nbytes() // width,), (1,))
            end += storage.nbytes() // width
        begin, flat = parts[storage.data_ptr()]
        served[name] = Served(begin, begin + flat.numel(), form(tensor))
    if not parts:
        raise MappingError(WHAT, expected=f"elements of {width} bytes", got="none")
    return torch.cat([flat for _, flat in parts.values()]), served
