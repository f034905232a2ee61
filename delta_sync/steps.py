"""ULP steps as zigzag numbers: one byte each, 255 escaping to an extension of the carrier's width.

Zigzag puts small steps of either sign first: +1 is 2, -1 is 1, +2 is 4. Zero never occurs.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from delta_sync.bitmap import Bits
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.jit import compiled

ESCAPE = 255


@compiled
def _zigzag(steps: Any, width: Any, low: Any, extension: Any) -> Any:
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    used = 0
    for i in range(steps.size):
        step = np.uint64(steps[i])
        negative = step >> np.uint64(width - 1)
        zigzag = ((step << np.uint64(1)) ^ (mask if negative else np.uint64(0))) & mask
        if zigzag < ESCAPE:
            low[i] = zigzag
        else:
            low[i] = ESCAPE
            extension[used] = zigzag
            used += 1
    return used


@compiled
def _unzigzag(low: Any, extension: Any, width: Any, steps: Any) -> Any:
    """Returns how much of ``extension`` is used, or -1 if a step is zero, or escaped without need."""
    mask = (np.uint64(1) << np.uint64(width)) - np.uint64(1)
    used = 0
    for i in range(low.size):
        zigzag = np.uint64(low[i])
        if zigzag == ESCAPE:
            if used == extension.size or extension[used] < ESCAPE:
                return -1
            zigzag = np.uint64(extension[used])
            used += 1
        if zigzag == 0:
            return -1
        steps[i] = (zigzag >> np.uint64(1)) ^ (mask if zigzag & np.uint64(1) else np.uint64(0))
    return used


def encode_steps(steps: Bits, dtype: DType) -> tuple[bytes, bytes]:
    """The step and extension streams of ULP steps."""
    low, extension = np.empty(steps.size, np.uint8), np.empty(steps.size, dtype.carrier)
    used = _zigzag(steps, 8 * dtype.itemsize, low, extension)
    return low.tobytes(), extension[:used].tobytes()


def decode_steps(low: bytes, extension: bytes, dtype: DType, what: str) -> Bits:
    """The inverse of ``encode_steps``; FormatError for a step of zero, or extensions that do not match."""
    zigzag, more = np.frombuffer(low, np.uint8), np.frombuffer(extension, dtype.carrier)
    steps = np.empty(zigzag.size, dtype.carrier)
    used = int(_unzigzag(zigzag, more, 8 * dtype.itemsize, steps))
    if used != more.size:
        got = "a zero step or a needless or missing one" if used < 0 else used
        raise FormatError(what, expected=f"steps that use {more.size} extensions", got=got)
    return steps
