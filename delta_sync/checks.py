"""What every tensor delta must satisfy before a loop without bounds checks may use it."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from delta_sync.errors import FormatError
from delta_sync.jit import compiled
from delta_sync.tensor_delta import TensorDelta


@compiled
def _first_bad(positions: Any, size: Any) -> Any:
    """Index of the first position that does not increase or lies outside the tensor, or -1."""
    before = -1
    for i in range(positions.size):
        if positions[i] <= before or positions[i] >= size:
            return i
        before = positions[i]
    return -1


def check(delta: TensorDelta) -> None:
    """FormatError unless positions increase strictly within the shape and values match them in type and number."""
    what, size = f"delta of {delta.name}", math.prod(delta.shape)
    if delta.positions.dtype != np.int64 or delta.positions.ndim != 1:
        got = f"{delta.positions.dtype} {list(delta.positions.shape)}"
        raise FormatError(f"{what}: positions", expected="int64 [n]", got=got)
    if delta.values.dtype != delta.dtype.carrier or delta.values.shape != delta.positions.shape:
        expected = f"{delta.dtype.carrier} [{delta.changed}]"
        raise FormatError(f"{what}: values", expected=expected, got=f"{delta.values.dtype} {list(delta.values.shape)}")
    bad = int(_first_bad(delta.positions, size))
    if bad >= 0:
        expected = f"strictly increasing positions below {size}"
        raise FormatError(what, expected=expected, got=f"{delta.positions[bad]} at index {bad}")
    if delta.encoding == "ulp" and not delta.values.all():
        raise FormatError(f"{what}: values", expected="ULP steps other than 0", got="a step of 0")
