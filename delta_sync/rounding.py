"""Comparing float32 weights with the bfloat16 bits that they were last rounded to, in one pass and without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_sync.bitmap import Bits, masks, ordinal
from delta_sync.delta import flat
from delta_sync.dtypes import dtype
from delta_sync.errors import FormatError
from delta_sync.jit import compiled, inlined
from delta_sync.lanes import LANES, everywhere, load_lanes, lowest
from delta_sync.tensor_delta import TensorDelta

BF16 = dtype("BF16")
_0, _1 = np.uint64(0), np.uint64(1)
_HALF, _ODD, _WIDTH = np.uint32(0x7FFF), np.uint32(1), np.uint32(16)
# Of a float's bits without the sign, moved up by one: below and above are the numbers of which rounding is the same
# everywhere. Denormal numbers are flushed by some CPUs and NaNs lose their payloads in several ways.
_FIRST_NORMAL, _INFINITY = np.uint32(0x01000000), np.uint32(0xFF000000)


@inlined
def _rounded(bits: Any) -> Any:
    """The bfloat16 bits nearest to a float32's, ties to even; of a number, zero or infinity."""
    return np.uint16((bits + _HALF + ((bits >> _WIDTH) & _ODD)) >> _WIDTH)


@inlined
def _is_odd_one(bits: Any) -> Any:
    moved = np.uint32(bits << _ODD)
    return (moved != np.uint32(0) and moved < _FIRST_NORMAL) or moved > _INFINITY


@intrinsic  # type: ignore[untyped-decorator]
def _compare(typing: Any, old: Any, new: Any, at: Any) -> Any:
    """Two words for the 64 elements from ``at``: where uint16 ``old`` is not uint32 ``new`` rounded; odd ones."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, (held, weights, start) = signature.args, args
        before, bits = (load_lanes(context, builder, kind, array, start) for kind, array in
                        ((kinds[0], held), (kinds[1], weights)))  # fmt: skip

        def every(value: Any) -> Any:
            return everywhere(builder, bits.type, ir.Constant(ir.IntType(32), int(value)))

        lowest_kept = builder.and_(builder.lshr(bits, every(_WIDTH)), every(_ODD))
        up = builder.add(builder.add(bits, every(_HALF)), lowest_kept)
        rounded = builder.trunc(builder.lshr(up, every(_WIDTH)), before.type)
        moved = builder.shl(bits, every(_ODD))
        small = builder.icmp_unsigned("<", builder.sub(moved, every(1)), every(int(_FIRST_NORMAL) - 1))
        odd = builder.or_(small, builder.icmp_unsigned(">", moved, every(_INFINITY)))
        word = ir.IntType(64)
        words = builder.bitcast(builder.icmp_unsigned("!=", before, rounded), word), builder.bitcast(odd, word)
        return context.make_tuple(builder, signature.return_type, words)

    return types.UniTuple(types.uint64, 2)(old, new, types.uint64), generate


@compiled
def _diff_rounded(old: Any, new: Any, sign: Any, flip: Any, state: Any, positions: Any, steps: Any) -> Any:
    """One pass; ``state``: where to begin and how many are found, moved on. 0: done, 1: no room, 2: an odd one."""
    at, k, size, room = state[0], state[1], np.uint64(old.size), np.uint64(positions.size)
    whole = size - size % LANES
    while at < size:
        if k + LANES > room:
            state[0], state[1] = at, k
            return 1
        changed, odd = _0, _0
        if at < whole:
            changed, odd = _compare(old, new, at)
        else:
            for i in range(size - at):
                changed |= np.uint64(old[at + i] != _rounded(new[at + i])) << i
                odd |= np.uint64(_is_odd_one(new[at + i])) << i
        if odd:
            return 2
        while changed:
            place = at + lowest(changed)
            changed &= changed - _1
            positions[k] = place
            after = np.uint64(_rounded(new[place]))
            steps[k] = ordinal(after, sign, flip) - ordinal(np.uint64(old[place]), sign, flip)
            k += _1
        at += LANES
    state[1] = k
    return 0


def diff_rounded(
    name: str, shape: Sequence[int], old_bits: Bits, weights: npt.NDArray[np.float32]
) -> TensorDelta | None:
    """The delta that turns BF16 ``old_bits`` into float32 ``weights`` rounded to nearest, both of ``shape`` or flat.

    None where a weight is denormal or NaN, whose rounding is the caller's: it differs between machines.
    FormatError if either has another element type or size.
    """
    old = flat(name, BF16, shape, old_bits)
    if weights.dtype != np.dtype("<f4") or weights.size != old.size:
        raise FormatError(f"weights of {name}", expected=f"float32 of shape {list(shape)}",
                          got=f"{weights.dtype} {list(weights.shape)}")  # fmt: skip
    new = np.ascontiguousarray(weights).reshape(-1).view("<u4")
    positions, steps = (np.empty(old.size // 64 + 64, kind) for kind in (np.int64, BF16.carrier))
    state = np.zeros(2, np.uint64)
    while outcome := _diff_rounded(old, new, *masks(BF16), state, positions, steps):
        if outcome == 2:
            return None
        positions, steps = (np.concatenate([a, np.empty_like(a)]) for a in (positions, steps))
    found = int(state[1])
    return TensorDelta(name, BF16, tuple(shape), "ulp", positions[:found].copy(), steps[:found].copy())
