"""Making and applying the delta of one tensor."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits, bits_of, masks, ordinal
from delta_sync.checks import check
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.folding import fold
from delta_sync.jit import compiled
from delta_sync.tensor_delta import TensorDelta

__all__ = ["apply", "check", "diff", "fold", "new_bits", "raw"]

_BLOCK = 64


@compiled
def _diff(old: Any, new: Any, sign: Any, flip: Any) -> Any:
    """One pass: whole blocks are compared by vector instructions, those that differ searched without branches."""
    size = old.size
    whole = size - size % _BLOCK
    capacity = size // 64 + _BLOCK
    positions = np.empty(capacity, np.int64)
    steps = np.empty(capacity, old.dtype)
    found = np.uint64(0)  # unsigned indices spare the loop numba's handling of negative ones
    for start in range(0, size, _BLOCK):
        stop = min(start + _BLOCK, size)
        if start < whole and not differs(old[start:stop], new[start:stop]):
            continue
        if found + np.uint64(_BLOCK) > np.uint64(capacity):
            capacity *= 2
            positions, steps = _grown(positions, found, capacity), _grown(steps, found, capacity)
        first = found
        for i in range(np.uint64(start), np.uint64(stop)):
            positions[found] = i
            found += np.uint64(old[i] != new[i])
        for k in range(first, found):
            at = np.uint64(positions[k])
            steps[k] = ordinal(np.uint64(new[at]), sign, flip) - ordinal(np.uint64(old[at]), sign, flip)
    return positions[:found].copy(), steps[:found].copy()


@compiled
def differs(old: Any, new: Any) -> Any:
    """Whether one whole block differs: a fixed length and an accumulator of the element's width vectorize."""
    any_bit = old.dtype.type(0)
    for i in range(_BLOCK):
        any_bit = old.dtype.type(any_bit | (old[i] ^ new[i]))
    return any_bit != 0


@compiled
def _grown(values: Any, used: Any, capacity: Any) -> Any:
    out = np.empty(capacity, values.dtype)
    out[:used] = values[:used]
    return out


@compiled
def _step_values(old: Any, steps: Any, sign: Any, flip: Any, out: Any) -> None:
    for i in range(steps.size):
        out[i] = bits_of(_stepped(old[i], steps[i], sign, flip), sign, flip)


@compiled
def _step_in_place(bits: Any, positions: Any, steps: Any, sign: Any, flip: Any) -> None:
    for i in range(steps.size):
        at = positions[i]
        bits[at] = bits_of(_stepped(bits[at], steps[i], sign, flip), sign, flip)


@compiled
def _stepped(bits: Any, step: Any, sign: Any, flip: Any) -> Any:
    """Ordinal of ``bits`` moved by ``step`` modulo 2**width; the width is that of ``sign`` and ``flip``."""
    return ordinal(np.uint64(bits), sign, flip) + np.uint64(step)


def diff(name: str, dtype: DType, shape: Sequence[int], old_bits: Bits, new_bits: Bits) -> TensorDelta:
    """The ULP delta that turns ``old_bits`` into ``new_bits``: carrier arrays of ``shape``, or flat.

    FormatError if either has another element type or size.
    """
    old, new = flat(name, dtype, shape, old_bits), flat(name, dtype, shape, new_bits)
    positions, steps = _diff(old, new, *masks(dtype))
    return TensorDelta(name, dtype, tuple(shape), "ulp", positions, steps)


def raw(name: str, dtype: DType, shape: Sequence[int], positions: npt.NDArray[np.int64], bits: Bits) -> TensorDelta:
    """The delta that sets the elements at ``positions`` to ``bits``, whatever they were; FormatError if malformed."""
    delta = TensorDelta(name, dtype, tuple(shape), "raw", positions, bits)
    check(delta)
    return delta


def new_bits(delta: TensorDelta, old_bits: Bits) -> Bits:
    """What the changed elements become, carrier ``[n]``, given their old bits ``[n]`` (unused by a raw delta)."""
    if delta.encoding == "raw":
        return delta.values
    if old_bits.dtype != delta.dtype.carrier or old_bits.shape != delta.values.shape:
        got = f"{old_bits.dtype} {list(old_bits.shape)}"
        expected = f"{delta.dtype.carrier} [{delta.changed}]"
        raise FormatError(f"old bits of {delta.name} at its changed positions", expected=expected, got=got)
    out = np.empty_like(delta.values)
    _step_values(old_bits, delta.values, *masks(delta.dtype), out)
    return out


def apply(delta: TensorDelta, bits: Bits) -> None:
    """Change a whole tensor's carrier bits in place; FormatError, bits untouched, if delta and bits do not fit."""
    check(delta)
    if bits.dtype != delta.dtype.carrier or bits.size != math.prod(delta.shape) or not bits.flags.c_contiguous:
        expected = f"contiguous {delta.dtype.carrier} of {math.prod(delta.shape)} elements"
        raise FormatError(f"bits of {delta.name}", expected=expected, got=f"{bits.dtype} {list(bits.shape)}")
    flat = bits.reshape(-1)
    if delta.encoding == "raw":
        flat[delta.positions] = delta.values
    else:
        _step_in_place(flat, delta.positions, delta.values, *masks(delta.dtype))


def flat(name: str, dtype: DType, shape: Sequence[int], bits: Bits) -> Bits:
    """A tensor's carrier bits as one contiguous row; FormatError for another element type or size."""
    if bits.dtype != dtype.carrier or bits.size != math.prod(shape):
        expected = f"{dtype.carrier} of shape {list(shape)}"
        raise FormatError(f"bits of {name}", expected=expected, got=f"{bits.dtype} {list(bits.shape)}")
    return np.ascontiguousarray(bits).reshape(-1)
