"""What changed in one tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from delta_sync.dtypes import DType

Encoding = Literal["ulp", "raw"]


@dataclass(frozen=True)
class TensorDelta:
    """The changed elements of one tensor.

    positions: int64 ``[n]``, strictly increasing row-major flat indices into ``shape``.
    values: the dtype's carrier ``[n]``; ULP steps modulo 2**bits, never 0 (encoding "ulp"), or absolute bits ("raw").
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    encoding: Encoding
    positions: npt.NDArray[np.int64]
    values: npt.NDArray[np.unsignedinteger]

    @property
    def changed(self) -> int:
        """How many elements this delta names."""
        return int(self.positions.size)
