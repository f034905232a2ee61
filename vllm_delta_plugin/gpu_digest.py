"""The digests of a GPU's live regions: one table of them, and launches that go through it."""

from __future__ import annotations

from array import array
from collections.abc import Iterator

import numpy as np
import torch

from vllm_delta_plugin.gpu_kernels import DIGEST_BLOCK, MAX_DIMS, ROUNDS, digest
from vllm_delta_plugin.live_digest import as_signed, tensor_key
from vllm_delta_plugin.live_storage import LiveStorage
from vllm_delta_plugin.regions import Region
from vllm_delta_plugin.transfer import to_device, to_host

_EACH = DIGEST_BLOCK * ROUNDS  # elements of a program


class DigestGroup:
    """Regions, none of them empty, of ``dims`` dimensions (1 stands for 0 too) and elements as those of ``like``."""

    def __init__(self, dims: int, like: torch.Tensor) -> None:
        self._dims, self._like = dims, like
        self._numbers: list[int] = []
        self._rows = array("q")  # a list would be made an array in one go, which keeps the interpreter from all others
        self._programs: list[int] = []  # of each region
        self._count = 0  # of all programs
        self._sums = torch.zeros(0, dtype=torch.int64, device=like.device)

    def add(self, number: int, region: Region, storage: LiveStorage) -> None:
        """One more, which its caller calls ``number``."""
        missing = MAX_DIMS - len(region.shape)
        row = [storage.bits.data_ptr(), as_signed(tensor_key(region.tensor)), region.dst_offset, region.src_offset]
        row += [region.numel, self._count, *[1] * missing, *region.shape]
        row += [*[0] * missing, *region.dst_strides, *[0] * missing, *region.src_strides]
        self._rows.extend(row)
        self._numbers.append(number)
        self._programs.append(-(-region.numel // _EACH))
        self._count += self._programs[-1]

    def launch(self, elements: int) -> Iterator[None]:
        """Have them made, with a pause for the caller after each launch of about ``elements``."""
        device = self._like.device
        piece_of = np.repeat(np.arange(len(self._numbers), dtype=np.int32), self._programs)
        self._sums = torch.zeros(len(self._numbers), dtype=torch.int64, device=device)
        pieces, owners = to_device(np.frombuffer(self._rows, np.int64), device), to_device(piece_of, device)
        step = max(1, elements // _EACH)
        for first in range(0, self._count, step):
            digest[(min(step, self._count - first),)](
                self._like, first, owners, pieces, self._sums,
                DIMS=self._dims, WIDTH=8 * self._like.element_size(), BLOCK=DIGEST_BLOCK, ROUNDS=ROUNDS,
            )  # fmt: skip
            yield

    @property
    def result(self) -> dict[int, int]:
        """Each region's digest, modulo 2**64 and maybe negative; waits for the GPU."""
        return dict(zip(self._numbers, to_host(self._sums).tolist(), strict=True))
