"""A delta object's streams made positions and steps on the GPU: 2.2 bytes a bfloat16 change cross the bus, not 10.

The host undoes the entropy coding, on the threads that fetch objects. What gap_codec.py does then, one change after the
other, are prefix sums here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch

from delta_sync.codec import Group
from delta_sync.context_file import unpack_if_alone
from delta_sync.delta_file import DEFAULT_CODEC, Unpacked, UnpackedGroup
from delta_sync.errors import FormatError
from delta_sync.gaps import MORE
from delta_sync.steps import ESCAPE, check_extensions
from vllm_delta_plugin.live_storage import SIGNED
from vllm_delta_plugin.transfer import to_host

_ALIGNED = 16  # bytes; where a stream begins in the memory that an object's streams share


@dataclass(frozen=True)
class Changes:
    """A group's changes on a GPU.

    running: int64 ``[n]``; less its value at the tensor before, and 1, that is a change's position in its tensor.
    sizes, signs: steps as in delta_sync/steps.py, uint8. extensions: signed ``[m]``. ranks: int64 ``[n]``, how many
    sizes up to each are extended (anything, where none is).
    """

    running: torch.Tensor
    sizes: torch.Tensor
    signs: torch.Tensor
    ranks: torch.Tensor
    extensions: torch.Tensor


def unpack_near(data: bytes, device: torch.device) -> Unpacked | bytes:
    """An object unpacked, in pinned memory where ``can_decode``; its bytes, if it decodes only against a base."""
    unpacked = unpack_if_alone(data)
    if isinstance(unpacked, bytes) or not can_decode(unpacked) or device.type == "cpu":
        return unpacked
    with torch.cuda.device(device):
        return replace(unpacked, groups=[_pinned(group) for group in unpacked.groups])


def can_decode(object_: Unpacked) -> bool:
    """Whether all groups are of the usual codec, and no tensor is in two of them."""
    names = [entry.name for group in object_.groups for entry in group.entries]
    usual = all(g.codec.name == DEFAULT_CODEC and g.coded.encoding == "ulp" for g in object_.groups)
    return usual and len(names) == len(set(names))


def decode(group: UnpackedGroup, device: torch.device) -> Changes:
    """The changes of one group of an object that ``can_decode``; FormatError as the codec's own decoding."""
    bytes_ = {name: _to_device(content, device) for name, content in group.contents.items()}
    running = _running(bytes_["gap"], group)
    extensions = bytes_["step_ext"].view(SIGNED[group.coded.dtype.itemsize])
    escaped = bytes_["step"] == ESCAPE
    ranks = torch.cumsum(escaped, 0) if extensions.numel() else running
    if group.coded.changed:
        _check(group, running, escaped)
    return Changes(running, bytes_["step"], bytes_["sign"], ranks, extensions)


def _running(gaps: torch.Tensor, group: UnpackedGroup) -> torch.Tensor:
    """How many elements there are up to each change, over all tensors: changed ones, and those in gaps."""
    ends = gaps != MORE
    at = torch.nonzero(ends)[:, 0]
    if at.numel() != group.coded.changed or (gaps.numel() and group.contents["gap"][-1] == MORE):
        raise _wrong_gaps(group.coded, f"{group.coded.changed} changes", f"{at.numel()}, or a gap without an end")
    return torch.cumsum(gaps.to(torch.int32) + ends, 0, dtype=torch.int64)[at]


def _check(group: UnpackedGroup, running: torch.Tensor, escaped: torch.Tensor) -> None:
    """FormatError unless positions are within their tensors, and extensions and signs are those of the sizes."""
    coded, contents = group.coded, group.contents
    stops = np.cumsum(coded.counts)
    last = torch.from_numpy(np.maximum(stops - 1, 0)).to(running.device)
    *reached, escapes = to_host(torch.cat([running[last], escaped.sum()[None]])).tolist()
    before = 0
    for count, size, end in zip(coded.counts, coded.sizes, reached, strict=True):
        if count and end - before > size:
            raise _wrong_gaps(coded, f"positions below {size}", f"{end - before - 1}")
        before = end if count else before
    more = np.frombuffer(contents["step_ext"], coded.dtype.carrier)
    signs = np.frombuffer(contents["sign"], np.uint8)
    check_extensions(escapes, more, signs, coded.changed, f"{coded.label} steps")


def _wrong_gaps(coded: Group, expected: str, got: str) -> FormatError:
    return FormatError(f"{coded.label} gaps", expected=expected, got=got)


def _pinned(group: UnpackedGroup) -> UnpackedGroup:
    """The same contents in one piece of pinned memory."""
    sizes = {name: len(content) for name, content in group.contents.items()}
    places, end = {}, 0
    for name, size in sizes.items():
        places[name] = slice(end, end + size)
        end += -(-size // _ALIGNED) * _ALIGNED
    memory = torch.empty(end, dtype=torch.uint8, pin_memory=True).numpy()
    contents: Mapping[str, np.ndarray[tuple[int], np.dtype[np.uint8]]] = {n: memory[p] for n, p in places.items()}
    for name, content in contents.items():
        content[:] = np.frombuffer(group.contents[name], np.uint8)
    return replace(group, contents=contents)


def _to_device(content: bytes | np.ndarray[tuple[int], np.dtype[np.uint8]], device: torch.device) -> torch.Tensor:
    """A copy on the device, under way on the current stream: what is copied must be kept until that is over."""
    host = torch.from_numpy(content if isinstance(content, np.ndarray) else np.frombuffer(content, np.uint8).copy())
    return host.to(device, non_blocking=True)
