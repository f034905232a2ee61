"""Sixty-four neighbouring elements at a time: comparisons whose outcome is a word with a bit for each.

Written for LLVM, which turns a comparison of 64 lanes into the machine's own vector instructions whatever their width;
a plain loop that collects bits it does not.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from delta_sync.jit import inlined

LANES = np.uint64(64)
_ONE, _ALL = np.uint64(1), np.uint64(2**64 - 1)
_WORD = ir.IntType(64)


@intrinsic  # type: ignore[untyped-decorator]
def unequal(typing: Any, one: Any, other: Any, at: Any) -> Any:
    """Bit i is set where ``one[at + i] != other[at + i]``, arrays of one element type with 64 elements from ``at``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kinds, (a, b, start) = signature.args, args
        left, right = (
            load_lanes(context, builder, kind, array, start) for kind, array in ((kinds[0], a), (kinds[1], b))
        )
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _WORD)

    return types.uint64(one, other, types.uint64), generate


@intrinsic  # type: ignore[untyped-decorator]
def narrow(typing: Any, bits: Any, at: Any, shift: Any, mask: Any, out: Any) -> Any:
    """Write ``(bits[at + i] >> shift) & mask`` for i below 64 to uint8 ``out[i]``; shift and mask are of bits' type."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = load_lanes(context, builder, signature.args[0], args[0], args[1])
        shifted = builder.lshr(lanes, everywhere(builder, lanes.type, args[2]))
        masked = builder.and_(shifted, everywhere(builder, lanes.type, args[3]))
        bytes_ = ir.VectorType(ir.IntType(8), int(LANES))
        small = builder.trunc(masked, bytes_) if lanes.type != bytes_ else masked
        place = _place(context, builder, signature.args[4], args[4], ir.Constant(_WORD, 0), bytes_)
        builder.store(small, place, align=1)
        return context.get_dummy_value()

    return types.void(bits, types.uint64, bits.dtype, bits.dtype, out), generate


@intrinsic  # type: ignore[untyped-decorator]
def below(typing: Any, values: Any, first: Any) -> Any:
    """Bit i is set where ``values[i] < first``, for the first 64 of uint8 ``values``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = load_lanes(context, builder, signature.args[0], args[0], ir.Constant(_WORD, 0))
        return builder.bitcast(builder.icmp_unsigned("<", lanes, everywhere(builder, lanes.type, args[1])), _WORD)

    return types.uint64(values, types.uint8), generate


@intrinsic  # type: ignore[untyped-decorator]
def ones(typing: Any, word: Any) -> Any:
    """How many bits of a uint64 are set."""
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.ctpop(args[0])


@intrinsic  # type: ignore[untyped-decorator]
def lowest(typing: Any, word: Any) -> Any:
    """The place of the lowest set bit of a uint64; 64 if there is none."""
    no = ir.Constant(ir.IntType(1), 0)
    return types.uint64(types.uint64), lambda context, builder, signature, args: builder.cttz(args[0], no)


@inlined
def place_of(word: Any, rank: Any) -> Any:
    """The place of the set bit of a uint64 that has ``rank`` set ones below it, of which there is one.

    Halves the word six times, without branches: where a bit lies is as good as random.
    """
    place, width = np.uint64(0), np.uint64(32)
    for _ in range(6):
        low = ones(word & ((_ONE << width) - _ONE))
        beyond = np.uint64(rank >= low)
        rank -= low * beyond
        shift = width * beyond
        word >>= shift
        place += shift
        width >>= _ONE
    return place


@inlined
def first_ones(count: Any) -> Any:
    """A word whose lowest ``count`` bits, 0 to 64, are set."""
    return _ALL if count >= LANES else (_ONE << count) - _ONE


def load_lanes(context: Any, builder: Any, kind: Any, array: Any, at: Any) -> Any:
    """The 64 elements of an array from ``at``, as one vector; part of an intrinsic."""
    place = _place(context, builder, kind, array, at, ir.VectorType(ir.IntType(kind.dtype.bitwidth), int(LANES)))
    loaded = builder.load(place)
    loaded.align = kind.dtype.bitwidth // 8
    return loaded


def _place(context: Any, builder: Any, kind: Any, array: Any, at: Any, vector: Any) -> Any:
    data = context.make_array(kind)(context, builder, array).data
    return builder.bitcast(builder.gep(data, [at]), vector.as_pointer())


def everywhere(builder: Any, vector: Any, value: Any) -> Any:
    """A vector with ``value`` in each lane."""
    nothing, first = ir.Constant(vector, ir.Undefined), ir.Constant(ir.IntType(32), 0)
    all_of_it = ir.Constant(ir.VectorType(ir.IntType(32), int(LANES)), None)
    return builder.shuffle_vector(builder.insert_element(nothing, value, first), nothing, all_of_it)
