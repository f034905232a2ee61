"""Host memory that a GPU reads and writes at the bus's speed."""

from __future__ import annotations

import mmap
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_SMALL = 1 << 20  # bytes; below it pinning costs more than it gains


def pinned_copy(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A flat copy in pinned memory of its own size (PyTorch's own pinned tensors take up to twice that).

    Pageable where there is no GPU, where the array is small, and where the driver refuses.
    """
    if array.nbytes < _SMALL or not torch.cuda.is_available():
        return array.copy()
    pages = mmap.mmap(-1, array.nbytes)
    copy: npt.NDArray[Any] = np.frombuffer(pages, array.dtype)
    copy[:] = array
    driver: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    if int(driver.cudaHostRegister(copy.ctypes.data, copy.nbytes, 0)) == 0:
        weakref.finalize(copy, driver.cudaHostUnregister, copy.ctypes.data).atexit = False
    return copy


class Arena:
    """Pinned memory that the changes of one capture land in, one after the other; grows by copying.

    ``positions`` int64 and ``steps`` (signed) of which the first ``used`` count.
    """

    def __init__(self, room: int, steps: torch.dtype, device: torch.device) -> None:
        self._pinned = device.type != "cpu"
        self.used = 0
        self.positions = self._empty(room, torch.int64)
        self.steps = self._empty(room, steps)

    def _empty(self, room: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(room, dtype=dtype, pin_memory=self._pinned)

    def take(self, count: int) -> slice:
        """The place of the next ``count`` changes; what was copied in asynchronously must have arrived before."""
        begin, self.used = self.used, self.used + count
        return slice(begin, self.used)

    def fits(self, count: int) -> bool:
        """Whether ``count`` more changes need no growth."""
        return self.used + count <= self.positions.numel()

    def grow(self, count: int) -> None:
        """Make room for ``count`` more changes, and as many again as there are."""
        room = 2 * self.used + count
        positions, steps = self._empty(room, torch.int64), self._empty(room, self.steps.dtype)
        positions[: self.used], steps[: self.used] = self.positions[: self.used], self.steps[: self.used]
        self.positions, self.steps = positions, steps
