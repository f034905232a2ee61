"""What the kernels that stage changes are told, and what they leave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vllm_delta_plugin.gpu_kernels import MAX_DIMS, PIECE
from vllm_delta_plugin.live_digest import as_signed, tensor_key
from vllm_delta_plugin.live_storage import LiveStorage
from vllm_delta_plugin.regions import Region


@dataclass(frozen=True)
class OnDevice:
    """Bits to flip (signed ``[n]``) at absolute addresses (int64 ``[n]``), all distinct, of one element width."""

    addresses: torch.Tensor
    staged: torch.Tensor


def by_width(parts: Sequence[OnDevice]) -> list[list[OnDevice]]:
    """The parts of each element width, without those that flip nothing."""
    widths: dict[int, list[OnDevice]] = {}
    for part in parts:
        if part.staged.numel():
            widths.setdefault(part.staged.element_size(), []).append(part)
    return list(widths.values())


def joined(parts: Sequence[OnDevice]) -> list[OnDevice]:
    """All parts of an element width as one: a commit looks after every tensor, on the engine's thread."""
    return [
        OnDevice(torch.cat([part.addresses for part in same]), torch.cat([part.staged for part in same]))
        for same in by_width(parts)
    ]


def row(region: Region, storages: Sequence[LiveStorage], place: Sequence[int] = (), *, raw: bool = False) -> list[int]:
    """The kernels' row about a piece, see gpu_kernels.PIECE; a dimension that is missing has one element."""
    missing = MAX_DIMS - len(region.shape)
    address, key = storages[region.storage].bits.data_ptr(), as_signed(tensor_key(region.tensor))
    row = [address, key, int(raw), region.src_offset, region.dst_offset]
    row += [*region.src_strides, *[1] * missing, *region.dst_strides, *[0] * missing]
    row += [*region.shape, *[1] * missing, *place]
    return row + [0] * (PIECE - len(row))
