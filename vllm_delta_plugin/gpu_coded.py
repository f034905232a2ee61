"""Changes that the GPU decodes, met with the live bits they change; see gpu_stage.py for those decoded by the host."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.codec import Group
from delta_sync.delta_file import UnpackedGroup
from vllm_delta_plugin.background import Pace
from vllm_delta_plugin.gpu_decode import beyond, check_found, decode
from vllm_delta_plugin.gpu_kernels import CODED_BLOCK, stage_coded
from vllm_delta_plugin.gpu_pieces import OnDevice, row
from vllm_delta_plugin.live_storage import SIGNED, LiveStorage, model_device
from vllm_delta_plugin.regions import Region
from vllm_delta_plugin.transfer import together_to_device


@dataclass(frozen=True)
class CodedPiece:
    """Changes of a group that belong to one tensor, of ``tensor_size`` elements, and a region of it."""

    region: Region
    changes: slice
    tensor_size: int

    @property
    def size(self) -> int:
        """How many changes are looked at."""
        return int(self.changes.stop - self.changes.start)


@dataclass(frozen=True)
class Pending:
    """What the GPU will have found out about a group's pieces; ``report`` is int64 on the device."""

    coded: Group
    extensions: int
    pieces: Sequence[CodedPiece]
    report: torch.Tensor

    def results(self, report: npt.NDArray[np.int64]) -> Iterator[tuple[Region, int, int]]:
        """Each region that changes, its digest's change and how many elements differ; FormatError."""
        check_found(self.coded, self.extensions, report[:2])
        sums, counts, outside = report[2:].reshape(3, -1)
        for piece, change, count, wrong in zip(self.pieces, sums, counts, outside, strict=True):
            if wrong:
                raise beyond(self.coded, piece.tensor_size)
            if count:  # of a tensor that is split over ranks, this rank's part may have none
                yield piece.region, int(change) % 2**64, int(count)


def stage_coded_on_device(
    group: UnpackedGroup, pieces: Sequence[CodedPiece], storages: Sequence[LiveStorage]
) -> tuple[OnDevice, Pending]:
    """Stage one group's changes, at least one, on the current stream, without waiting for them; FormatError."""
    device, width = model_device(storages), group.coded.dtype.itemsize
    changes = decode(group, device)
    report = torch.zeros(2 + 3 * len(pieces), dtype=torch.int64, device=device)
    report[:2].copy_(changes.found)
    sums, counts, outside = report[2:].view(3, -1)
    rows: list[list[int]] = []
    programs: list[int] = []
    total = begun = 0
    pace = Pace()
    for piece in pieces:
        place = [piece.changes.start, piece.changes.stop, total, begun, piece.tensor_size]
        rows.append(row(piece.region, storages, place))
        programs.append(-(-piece.size // CODED_BLOCK))
        total, begun = total + piece.size, begun + programs[-1]
        pace()
    addresses = torch.empty(total, dtype=torch.int64, device=device)
    staged = torch.empty(total, dtype=SIGNED[width], device=device)
    if pieces:
        owners = np.repeat(np.arange(len(pieces), dtype=np.int64), programs)
        together = together_to_device([np.array(rows, np.int64).tobytes(), owners.tobytes()], device)
        table, piece_of = (each.view(torch.int64) for each in together)
        stage_coded[(begun,)](
            changes.running, changes.sizes, changes.signs, changes.ranks, changes.extensions,
            changes.extensions.numel(), addresses, staged, piece_of, table, sums, counts, outside,
            WIDTH=8 * width, BLOCK=CODED_BLOCK,
        )  # fmt: skip
    if any(piece.region.numel != piece.tensor_size for piece in pieces):
        inside = addresses != 0
        addresses, staged = addresses[inside], staged[inside]
    return OnDevice(addresses, staged), Pending(group.coded, changes.extensions.numel(), pieces, report)
