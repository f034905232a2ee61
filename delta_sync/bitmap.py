"""The injective monotone map from an element's bits to an unsigned ordinal.

Neighbouring values have neighbouring ordinals, and every bit pattern has its own: -0 and +0 are one step apart and
each NaN payload keeps its place, so a step between ordinals, modulo 2**bits, restores any bits from any others.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.dtypes import DType
from delta_sync.jit import compiled

Bits = npt.NDArray[np.unsignedinteger]


def masks(dtype: DType) -> tuple[np.uint64, np.uint64]:
    """The two words that define the map: bits ``b`` have ordinal ``b ^ (sign | (flip if b & sign else 0))``."""
    width = 8 * dtype.itemsize
    sign = 0 if dtype.order == "uint" else 1 << (width - 1)
    flip = (1 << width) - 1 if dtype.order == "float" else 0
    return np.uint64(sign), np.uint64(flip)


@compiled
def ordinal(bits: Any, sign: Any, flip: Any) -> Any:
    """Ordinal of one element's bits, all as uint64."""
    return bits ^ (sign | flip) if bits & sign else bits ^ sign


@compiled
def bits_of(ordinal: Any, sign: Any, flip: Any) -> Any:
    """Bits of one ordinal, all as uint64."""
    return ordinal ^ sign if ordinal & sign else ordinal ^ (sign | flip)


@compiled
def _map_forward(bits: Any, sign: Any, flip: Any, out: Any) -> None:
    for i in range(bits.size):
        out[i] = ordinal(np.uint64(bits[i]), sign, flip)


@compiled
def _map_back(ordinals: Any, sign: Any, flip: Any, out: Any) -> None:
    for i in range(ordinals.size):
        out[i] = bits_of(np.uint64(ordinals[i]), sign, flip)


def to_ordinal(bits: Bits, dtype: DType) -> Bits:
    """Map carrier bits, any shape, to ordinals of the same carrier and shape."""
    out = np.empty(bits.shape, dtype.carrier)
    _map_forward(np.ascontiguousarray(bits).reshape(-1), *masks(dtype), out.reshape(-1))
    return out


def from_ordinal(ordinals: Bits, dtype: DType) -> Bits:
    """Map ordinals, any shape, back to carrier bits: the inverse of ``to_ordinal``."""
    out = np.empty(ordinals.shape, dtype.carrier)
    _map_back(np.ascontiguousarray(ordinals).reshape(-1), *masks(dtype), out.reshape(-1))
    return out
