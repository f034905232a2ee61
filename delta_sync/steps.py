"""ULP steps as a sign bit and a size byte: size is the step's magnitude less one, 255 escaping to an extension.

Signs are as good as random, so they are packed, eight a byte, and left alone; sizes are mostly zero and compress well.
A step of zero cannot be written.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.jit import compiled

ESCAPE = 255


@compiled
def _split(steps: Any, low: Any, signs: Any) -> Any:
    """Sizes, capped, and signs of steps; how many sizes are ESCAPE and more."""
    top, escapes = np.uint64(8 * steps.itemsize - 1), 0
    cap = steps.dtype.type(ESCAPE)
    for k in range(steps.size):
        step = steps[k]
        negative = np.uint8(np.uint64(step) >> top)
        one = steps.dtype.type(1)
        size = steps.dtype.type(steps.dtype.type(~step) if negative else steps.dtype.type(step - one))
        escapes += size >= cap
        low[k] = min(size, cap)
        signs[k >> 3] |= negative << np.uint8(k & 7)
    return escapes


@compiled
def _join(low: Any, more: Any, signs: Any, steps: Any) -> Any:
    """Steps from sizes, extensions, of which there are enough, and signs; how many extensions are used."""
    used = 0
    for k in range(low.size):
        size = steps.dtype.type(low[k])
        if low[k] == ESCAPE:
            size = more[used]
            used += 1
        negative = signs[k >> 3] >> np.uint8(k & 7) & np.uint8(1)
        steps[k] = ~size if negative else size + steps.dtype.type(1)
    return used


def split_steps(steps: Bits, dtype: DType) -> tuple[Any, Bits, Any]:
    """Size bytes ``[n]``, extensions and packed signs of ULP steps, carrier ``[n]``, none of them zero."""
    low, signs = np.empty(steps.size, np.uint8), np.zeros(sign_bytes(steps.size), np.uint8)
    if not _split(steps, low, signs):
        return low, steps[:0], signs
    large = steps[low == ESCAPE]
    negative = large >= np.asarray(1 << (8 * dtype.itemsize - 1), dtype.carrier)
    return low, np.where(negative, np.invert(large), large - np.asarray(1, dtype.carrier)), signs


def encode_steps(steps: Bits, dtype: DType) -> tuple[bytes, bytes, bytes]:
    """The size, extension and sign streams of ULP steps, carrier ``[n]``, none of them zero."""
    low, extension, signs = split_steps(steps, dtype)
    return low.tobytes(), extension.tobytes(), signs.tobytes()


def decode_steps(low: bytes | npt.NDArray[np.uint8], extension: bytes, signs: bytes, dtype: DType, what: str) -> Bits:
    """The inverse of ``encode_steps``; FormatError for extensions or signs that do not match the sizes."""
    sizes, packed = np.frombuffer(low, np.uint8), np.frombuffer(signs, np.uint8)
    more = np.frombuffer(extension, dtype.carrier)
    check_escapes(int(np.count_nonzero(sizes == ESCAPE)), more.size, what)
    check_extensions(more, packed, sizes.size, what)
    steps: Bits = np.empty(sizes.size, dtype.carrier)
    _join(sizes, more, packed, steps)
    return steps


def check_escapes(escapes: int, extensions: int, what: str) -> None:
    """FormatError unless each size that is ESCAPE has its extension."""
    if escapes != extensions:
        raise FormatError(what, expected=f"{escapes} step extensions", got=extensions)


def check_extensions(more: Bits, packed: npt.NDArray[np.uint8], count: int, what: str) -> None:
    """FormatError unless all extensions are needed, and signs are those of ``count`` steps."""
    if (more < ESCAPE).any() or (more >> (8 * more.itemsize - 1)).any():
        expected = f"step extensions from {ESCAPE} up, of at most half the range"
        raise FormatError(what, expected=expected, got=f"{int(more.min())} to {int(more.max())}")
    if count % 8 and packed[-1] >> count % 8:
        raise FormatError(what, expected="zeros after the last sign bit", got="ones")


def sign_bytes(count: int) -> int:
    """Bytes that the signs of ``count`` steps take."""
    return (count + 7) // 8
