"""ULP steps as a sign bit and a size byte: size is the step's magnitude less one, 255 escaping to an extension.

Signs are as good as random, so they are packed, eight a byte, and left alone; sizes are mostly zero and compress well.
A step of zero cannot be written.
"""

from __future__ import annotations

import numpy as np

from delta_sync.bitmap import Bits
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError

ESCAPE = 255


def encode_steps(steps: Bits, dtype: DType) -> tuple[bytes, bytes, bytes]:
    """The size, extension and sign streams of ULP steps, carrier ``[n]``, none of them zero."""
    negative = steps >= np.asarray(1 << (8 * dtype.itemsize - 1), dtype.carrier)
    sizes = np.where(negative, np.negative(steps), steps) - np.asarray(1, dtype.carrier)
    low = np.minimum(sizes, ESCAPE).astype(np.uint8)
    return low.tobytes(), sizes[low == ESCAPE].tobytes(), np.packbits(negative, bitorder="little").tobytes()


def decode_steps(low: bytes, extension: bytes, signs: bytes, dtype: DType, what: str) -> Bits:
    """The inverse of ``encode_steps``; FormatError for extensions or signs that do not match the sizes."""
    sizes = np.frombuffer(low, np.uint8).astype(dtype.carrier)
    negative = np.unpackbits(np.frombuffer(signs, np.uint8), bitorder="little").view(np.bool_)
    more = np.frombuffer(extension, dtype.carrier)
    escaped = np.flatnonzero(sizes == ESCAPE)
    if escaped.size != more.size:
        raise FormatError(what, expected=f"{escaped.size} step extensions", got=more.size)
    sizes[escaped] = more
    if (more < ESCAPE).any() or (more >> (8 * dtype.itemsize - 1)).any():
        expected = f"step extensions from {ESCAPE} up, of at most half the range"
        raise FormatError(what, expected=expected, got=f"{int(more.min())} to {int(more.max())}")
    if negative[sizes.size :].any():
        raise FormatError(what, expected="zeros after the last sign bit", got="ones")
    steps: Bits = sizes + np.asarray(1, dtype.carrier)
    np.negative(steps, out=steps, where=negative[: steps.size])
    return steps


def sign_bytes(count: int) -> int:
    """Bytes that the signs of ``count`` steps take."""
    return (count + 7) // 8
