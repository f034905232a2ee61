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
from delta_sync.lanes import LANES, lowest, unequal
from delta_sync.tensor_delta import TensorDelta

__all__ = ["apply", "check", "diff", "fold", "new_bits", "raw"]

_0, _1 = np.uint64(0), np.uint64(1)


@compiled
def _diff(old: Any, new: Any, sign: Any, flip: Any, state: Any, positions: Any, steps: Any) -> Any:
    """One pass, a block of 64 elements at once; ``state``: where to begin and how many are found, moved on.

    False: no room for all that a block may hold.
    """
    at, k, size, room = state[0], state[1], np.uint64(old.size), np.uint64(positions.size)
    whole = size - size % LANES
    while at < size:
        if k + LANES > room:
            state[0], state[1] = at, k
            return False
        changed = _0
        if at < whole:
            changed = unequal(old, new, at)
        else:
            for i in range(size - at):
                changed |= np.uint64(old[at + i] != new[at + i]) << i
        while changed:
            place = at + lowest(changed)
            changed &= changed - _1
            positions[k] = place
            steps[k] = ordinal(np.uint64(new[place]), sign, flip) - ordinal(np.uint64(old[place]), sign, flip)
            k += _1
        at += LANES
    state[1] = k
    return True


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
    positions, steps = (np.empty(old.size // 64 + 64, kind) for kind in (np.int64, dtype.carrier))
    state = np.zeros(2, np.uint64)
    while not _diff(old, new, *masks(dtype), state, positions, steps):
        positions, steps = (np.concatenate([a, np.empty_like(a)]) for a in (positions, steps))
    found = int(state[1])
    return TensorDelta(name, dtype, tuple(shape), "ulp", positions[:found].copy(), steps[:found].copy())


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
