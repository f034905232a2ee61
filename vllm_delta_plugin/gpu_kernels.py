"""The three passes over live weights on a GPU, in Triton: flip staged bits, make them from steps, digest.

Import this module only where Triton is installed (it comes with every CUDA build of PyTorch).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

BLOCK = 256
FLIP_WARPS = 8  # an element a thread
# A row of the stage kernels' table, int64 [24]: the storage's address, the tensor's digest key, 1 if bits are given
# instead of steps, the region's first position and first live element, four source strides, four live strides, four
# sizes (13 to 16); for coded changes (17 to 21) also which change of the group is the tensor's first, and the one
# after its last, where in the output the piece begins, the number of its first program, and the tensor's size.
PIECE = 24
CODED_BLOCK = 1024
# A row of the digest's table, int64 [18]: the storage's address, the tensor's digest key, the region's first live
# element and first position, how many elements it has, the number of its first program, four sizes, live and source
# strides.
DIGEST_BLOCK, ROUNDS = 1024, 16  # one program of the digest sums up so many blocks before its atomic addition
MAX_DIMS = 4  # of a region that these kernels take


@triton.jit
def flip(like, part_of, parts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Flip at absolute addresses the bits that are staged for them; once more undoes it.

    ``part_of`` (int32 ``[grid]``): each program's part. A row of ``parts``, int64 ``[4]``: where the part's addresses
    (int64) and staged bits (of the type of ``like``) are, how many, and the number of its first program.

    The memory's cache does it, in words of four bytes: nothing is read back. Reading and writing an 8B model's 75.7 M
    elements took 4.1 ms, this 3.1 (H200), as long as writing alone.
    """
    program = tl.program_id(0)
    part = parts + tl.load(part_of + program).to(tl.int64) * 4
    addresses, staged = tl.load(part).to(tl.pointer_type(tl.int64)), tl.load(part + 1).to(like.dtype)
    at = (program - tl.load(part + 3)) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(part + 2)
    address = tl.load(addresses + at, mask=mask, other=0)
    bits = tl.load(staged + at, mask=mask, other=0).to(tl.int32)
    if WIDTH < 32:
        bits = (bits & ((1 << WIDTH) - 1)) << ((address & 3) * 8).to(tl.int32)
    tl.atomic_xor((address & -4).to(tl.pointer_type(tl.int32)), bits, mask=mask, sem="relaxed")


@triton.jit
def _factor(position, key):
    """The digest's weight of an element, FORMAT.md 7.1; uint64."""
    z = key + (position + 1).to(tl.uint64) * 0x9E3779B97F4A7C15
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB
    return (z ^ (z >> 31)) | 1


@triton.jit
def _live(piece, rest):
    """The live elements of a piece's region that lie ``rest`` positions after its first, and which are in it."""
    element = tl.load(piece + 4)
    inside = rest >= 0
    for dim in tl.static_range(4):
        stride = tl.load(piece + 5 + dim)
        index = rest // stride
        rest -= index * stride
        element += index * tl.load(piece + 9 + dim)
        inside &= index < tl.load(piece + 13 + dim)
    return element, inside & (rest == 0)


@triton.jit
def _stepped(old, step, WIDTH: tl.constexpr):
    """The bits that lie ``step`` ULPs from ``old``; int64 of which the low WIDTH bits are set or zero."""
    ALL: tl.constexpr = (1 << WIDTH) - 1
    SIGN: tl.constexpr = 1 << (WIDTH - 1)
    moved = (tl.where((old & SIGN) != 0, old ^ ALL, old ^ SIGN) + step) & ALL
    return tl.where((moved & SIGN) != 0, moved ^ SIGN, moved ^ ALL)


@triton.jit(do_not_specialize=["size", "count"])
def spread(gaps, order, reached, running, size, count, BLOCK: tl.constexpr):
    """Of bytes that end a gap, of which byte i is the ``order[i]``-th, bring ``reached`` (int64) together.

    ``gaps``: uint8 ``[size]``; ``running``: int64 ``[count]``; more ends than that are left out.
    """
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    ends = tl.load(gaps + at, mask=at < size, other=255) != 255
    to = tl.load(order + at, mask=ends, other=1).to(tl.int64) - 1
    tl.store(running + to, tl.load(reached + at, mask=ends, other=0), mask=ends & (to < count))


@triton.jit(do_not_specialize=["extended"])
def stage_coded(
    running, sizes, signs, ranks, extensions, extended, addresses, staged, piece_of, pieces, sums, counts, beyond,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same for changes as ``gpu_decode.Changes`` has them; outside the region the address is 0.

    ``extended``: how many extensions there are. ``piece_of`` (int64 ``[grid]``): each program's piece; all of a
    tensor's changes are looked at for each region. ``sums``, ``counts`` and ``beyond`` (changes outside the tensor) are
    int64, per piece.
    """
    program = tl.program_id(0)
    number = tl.load(piece_of + program)
    piece = pieces + number * 24  # PIECE
    begin, end = tl.load(piece + 17), tl.load(piece + 18)
    at = begin + (program - tl.load(piece + 20)) * BLOCK + tl.arange(0, BLOCK)
    mask = at < end
    ALL: tl.constexpr = (1 << WIDTH) - 1

    before = tl.load(running + begin - 1, mask=begin > 0, other=0)
    position = tl.load(running + at, mask=mask, other=0) - before - 1
    element, inside = _live(piece, position - tl.load(piece + 3))
    inside &= mask
    address = tl.where(inside, tl.load(piece) + element * (WIDTH // 8), 0)
    old = tl.load(address.to(staged.dtype), mask=inside, other=0).to(tl.int64) & ALL
    size = tl.load(sizes + at, mask=inside, other=0).to(tl.int64)
    long = inside & (size == 255)
    rank = tl.load(ranks + at, mask=long, other=1).to(tl.int64)
    long &= rank <= extended
    size = tl.where(long, tl.load(extensions + rank - 1, mask=long, other=0).to(tl.int64), size)
    negative = (tl.load(signs + at // 8, mask=inside, other=0).to(tl.int64) >> (at % 8)) & 1
    new = _stepped(old, tl.where(negative != 0, ~size, size + 1), WIDTH)
    out = tl.load(piece + 19) + at - begin
    tl.store(addresses + out, address, mask=mask)
    tl.store(staged + out, (new ^ old).to(staged.dtype.element_ty), mask=mask)

    change = _factor(position, tl.load(piece + 1).to(tl.uint64)) * (new - old).to(tl.uint64)
    tl.atomic_add(sums + number, tl.sum(tl.where(inside, change.to(tl.int64), 0)))
    tl.atomic_add(counts + number, tl.sum((inside & (new != old)).to(tl.int64)))
    outside = mask & ((position < 0) | (position >= tl.load(piece + 21)))
    tl.atomic_add(beyond + number, tl.sum(outside.to(tl.int64)))


@triton.jit
def stage(relative, addresses, staged, programs, pieces, sums, counts, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Turn positions into addresses, and steps in place into bits to flip, and sum up what would change.

    One program handles changes ``[first, stop)`` of one piece, as ``programs`` (int64 ``[grid, 3]``) says. A piece is a
    run of changes of one encoding to one region: see PIECE. ``relative`` (uint32): positions after the region's first.
    ``staged``: steps, or bits. ``sums`` (int64, modulo 2**64) and ``counts`` (int32) are per piece.
    """
    row = programs + tl.program_id(0) * 3
    first, stop, number = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    piece = pieces + number * 24  # PIECE
    at = first + tl.arange(0, BLOCK)
    mask = at < stop
    ALL: tl.constexpr = (1 << WIDTH) - 1

    rest = tl.load(relative + at, mask=mask, other=0).to(tl.int64) & 0xFFFFFFFF
    position = rest + tl.load(piece + 3)
    element, _ = _live(piece, rest)
    address = tl.load(piece) + element * (WIDTH // 8)
    old = tl.load(address.to(staged.dtype), mask=mask, other=0).to(tl.int64) & ALL
    given = tl.load(staged + at, mask=mask, other=0).to(tl.int64) & ALL
    new = tl.where(tl.load(piece + 2) != 0, given, _stepped(old, given, WIDTH))
    tl.store(addresses + at, address, mask=mask)
    tl.store(staged + at, (new ^ old).to(staged.dtype.element_ty), mask=mask)

    change = _factor(position, tl.load(piece + 1).to(tl.uint64)) * (new - old).to(tl.uint64)
    tl.atomic_add(sums + number, tl.sum(tl.where(mask, change.to(tl.int64), 0)))
    tl.atomic_add(counts + number, tl.sum((mask & (new != old)).to(tl.int32)))


@triton.jit(do_not_specialize=["first"])
def digest(
    like, first, piece_of, pieces, sums, DIMS: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
    ROUNDS: tl.constexpr,
):  # fmt: skip
    """Add to each piece's ``sums`` (int64) its part of its tensor's digest, by the programs from ``first`` on.

    ``piece_of`` (int32, of all programs): each one's piece, a region, as a row says. Its live element ``l + i . d`` is
    position ``p + i . s`` of the tensor, for ``i`` below its sizes, of which the last ``DIMS`` count. ``like`` has the
    storages' element type.
    """
    program = tl.program_id(0) + first
    number = tl.load(piece_of + program)
    piece = pieces + number.to(tl.int64) * 18
    bits, key = tl.load(piece).to(like.dtype), tl.load(piece + 1).to(tl.uint64)
    live0, src0, total = tl.load(piece + 2), tl.load(piece + 3), tl.load(piece + 4)
    n1, n2, n3 = tl.load(piece + 7), tl.load(piece + 8), tl.load(piece + 9)
    d0, d1, d2, d3 = tl.load(piece + 10), tl.load(piece + 11), tl.load(piece + 12), tl.load(piece + 13)
    s0, s1, s2, s3 = tl.load(piece + 14), tl.load(piece + 15), tl.load(piece + 16), tl.load(piece + 17)
    part = tl.zeros((BLOCK,), tl.int64)
    begin = (program - tl.load(piece + 5)) * BLOCK * ROUNDS
    for turn in range(ROUNDS):
        at = begin + turn * BLOCK + tl.arange(0, BLOCK)
        mask = at < total
        inner = at % n3 if DIMS > 1 else at
        live, position = live0 + inner * d3, src0 + inner * s3
        if DIMS > 1:
            outer = at // n3
            i2 = outer % n2 if DIMS > 2 else outer
            live, position = live + i2 * d2, position + i2 * s2
            if DIMS > 2:
                outer = outer // n2
                i1 = outer % n1 if DIMS > 3 else outer
                live, position = live + i1 * d1, position + i1 * s1
                if DIMS > 3:
                    live, position = live + outer // n1 * d0, position + outer // n1 * s0
        value = tl.load(bits + live, mask=mask, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
        part += (_factor(position, key) * value.to(tl.uint64)).to(tl.int64)
    tl.atomic_add(sums + number, tl.sum(part))
