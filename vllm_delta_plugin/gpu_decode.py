"""A delta object's streams made positions and steps on the GPU: 2.2 bytes a bfloat16 change cross the bus, not 10.

The host undoes the entropy coding, on the threads that fetch objects. What gap_codec.py does then, one change after the
other, are prefix sums here. Nothing waits for what they find: what is wrong with the streams turns out at the end.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.codec import Group
from delta_sync.delta_file import DEFAULT_CODEC, Unpacked, UnpackedGroup
from delta_sync.errors import FormatError
from delta_sync.gaps import MORE
from delta_sync.steps import ESCAPE, check_escapes, check_extensions
from vllm_delta_plugin.gpu_kernels import CODED_BLOCK, spread
from vllm_delta_plugin.live_storage import SIGNED
from vllm_delta_plugin.transfer import together_to_device

DECODING = 40  # bytes of device memory a change, at most, that decoding takes for a moment


@dataclass(frozen=True)
class Changes:
    """A group's changes on a GPU.

    running: int64 ``[n]``; less its value at the tensor before, and 1, that is a change's position in its tensor.
    sizes, signs: steps as in delta_sync/steps.py, uint8. extensions: signed ``[m]``. ranks: int32 ``[n]``, how many
    sizes up to each are extended (anything, where none is). found: int64 ``[2]``, how many gaps and extended sizes
    there are; where ``check_found`` refuses them the rest is anything.
    """

    running: torch.Tensor
    sizes: torch.Tensor
    signs: torch.Tensor
    ranks: torch.Tensor
    extensions: torch.Tensor
    found: torch.Tensor


def can_decode(object_: Unpacked) -> bool:
    """Whether all groups are of the usual codec, and no tensor is in two of them."""
    names = [entry.name for group in object_.groups for entry in group.entries]
    usual = all(g.codec.name == DEFAULT_CODEC and g.coded.encoding == "ulp" for g in object_.groups)
    return usual and len(names) == len(set(names))


def decode(group: UnpackedGroup, device: torch.device) -> Changes:
    """The changes of a group, at least one, of an object that ``can_decode``, under way on the current stream.

    FormatError for what can be seen without the GPU; ``check_found`` tells of the rest.
    """
    coded, contents = group.coded, [group.contents[name] for name in ("gap", "step", "sign", "step_ext")]
    more = np.frombuffer(contents[3], coded.dtype.carrier)
    if contents[0][-1] == MORE:
        raise _wrong_gaps(coded, f"{coded.changed} changes", "a gap without an end")
    check_extensions(more, np.frombuffer(contents[2], np.uint8), coded.changed, f"{coded.label} steps")
    gaps, sizes, signs, extensions = together_to_device(contents, device)
    ends, escaped = gaps != MORE, sizes == ESCAPE
    order = torch.cumsum(ends, 0, dtype=torch.int32)
    reached = torch.cumsum(gaps.to(torch.int32) + ends, 0, dtype=torch.int64)
    running = torch.empty(coded.changed, dtype=torch.int64, device=device)
    spread[(-(-gaps.numel() // CODED_BLOCK),)](
        gaps, order, reached, running, gaps.numel(), coded.changed, BLOCK=CODED_BLOCK
    )
    ranks = torch.cumsum(escaped, 0, dtype=torch.int32) if more.size else order
    found = torch.stack([order[-1].long(), escaped.sum()])
    return Changes(running, sizes, signs, ranks, extensions.view(SIGNED[coded.dtype.itemsize]), found)


def check_found(coded: Group, extensions: int, found: npt.NDArray[np.int64]) -> None:
    """FormatError unless there are as many gaps as changes, and as many extended sizes as ``extensions``."""
    gaps, escapes = found.tolist()
    if gaps != coded.changed:
        raise _wrong_gaps(coded, f"{coded.changed} changes", f"{gaps}")
    check_escapes(escapes, extensions, f"{coded.label} steps")


def beyond(coded: Group, size: int) -> FormatError:
    """What a change beyond a tensor of ``size`` elements raises."""
    return _wrong_gaps(coded, f"positions below {size}", "gaps that lead beyond")


def _wrong_gaps(coded: Group, expected: str, got: str) -> FormatError:
    return FormatError(f"{coded.label} gaps", expected=expected, got=got)
