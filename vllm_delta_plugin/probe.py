"""Where vLLM's processing puts each element of a module's weights, found by processing numbers in their place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy.typing as npt
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.process_seam import Unprocessed
from vllm_delta_plugin.live_storage import SIGNED
from vllm_delta_plugin.transfer import to_host

_CHUNK = 1 << 24  # elements that are worked on at once
Numbers = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Layout:
    """``where``, integers ``[n]``: of each loaded element, counted from ``first[parameter]``, the place that serves it.

    -1: nowhere. ``served``: of each parameter that is served, the first place and the one after the last.
    """

    first: Mapping[str, int]
    served: Mapping[str, tuple[int, int]]
    where: npt.NDArray[Any]


def probe(module: Unprocessed, width: int, device: torch.device) -> Layout:
    """Find it for parameters of ``width`` bytes an element, on ``device``; MappingError if elements are not just moved.

    Elements are numbered from 1; a number that needs more bits than an element has goes in several passes. One more
    pass, of other bits, proves that bits are only moved. What is in no place loaded must be zero: padding.
    """
    first, total = {}, 0
    for name, parameter in module.parameters.items():
        if parameter.element_size() == width:
            first[name], total = total, total + parameter.numel()
    kind = torch.int32 if total < 2**31 else torch.int64
    origin = torch.zeros(0, dtype=kind, device=device)
    for shift in range(0, total.bit_length(), 8 * width):
        digits, served = _served(_made(module, device, first, partial(_digit, shift=shift)), width)
        if not shift:
            origin = torch.zeros(digits.shape, dtype=kind, device=device)
        for part in _chunks(digits):
            origin[part] |= (digits[part].to(torch.int64) & ((1 << 8 * width) - 1)).to(kind) << shift
    moved, served = _served(_made(module, device, first, _scrambled), width)
    for part in _chunks(moved):
        expected = _scrambled(origin[part]).to(moved.dtype)
        if not torch.equal(moved[part], torch.where(origin[part] == 0, 0, expected)) or int(origin[part].max()) > total:
            raise MappingError("weights that vLLM processes", expected="elements put elsewhere", got="other elements")
    where = torch.full((total + 1,), -1, dtype=kind, device=device)
    for part in _chunks(origin):
        where[origin[part].long()] = torch.arange(part.start, part.stop, dtype=kind, device=device)
    where = where[1:]
    if int((where >= 0).sum()) != int((origin > 0).sum()):
        raise MappingError("weights that vLLM processes", expected="each element once", got="some several times")
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


def _served(made: Mapping[str, torch.Tensor], width: int) -> tuple[torch.Tensor, dict[str, tuple[int, int]]]:
    """The bits of all of that width in one array, an element left out after each, and where each one's memory is."""
    parts: list[torch.Tensor] = []
    served, end = {}, 0
    for name, tensor in made.items():
        if tensor.element_size() != width:
            continue
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=SIGNED[width], device=tensor.device)
        flat.set_(storage, 0, (storage.nbytes() // width,), (1,))
        served[name] = end, end + flat.numel()
        parts += [flat, flat.new_zeros(1)]
        end += flat.numel() + 1
    return torch.cat(parts), served
