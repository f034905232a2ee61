"""What changed since the snapshot, found on the GPU in one read of both: cast, compare to a bit each; then compact.

The comparison only streams: counting what differs, and looking at it again, is left to bits that are 1/48 of what was
read. (Bringing changes together in the same pass took a scan of every block, and three times as long.)

Import this module only where Triton is installed (it comes with every CUDA build of PyTorch).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TILE = 16384  # elements of a program
ROOM = TILE // 16  # changes of a tile, on average over a bucket, that are brought together at once
# A row of the table of pieces, int64: the live elements' address, the snapshot's, how many elements, the first tile,
# the first element's position in its tensor.
PIECE = 5
BLOCK, WARPS = 2048, 8
# How live elements become served bits: as they are (2 or 4 bytes), or cast as PyTorch casts them.
SAME16, SAME32, F32_TO_BF16, F32_TO_F16 = range(4)


@triton.jit
def _load(address, at, inside, WIDTH: tl.constexpr, ALIGNED: tl.constexpr):
    """Elements ``at`` of WIDTH bits as int32, sign-extended; without ``inside`` all of them, in wide loads."""
    pointers = address.to(tl.pointer_type(tl.int16 if WIDTH == 16 else tl.int32)) + at
    if ALIGNED:
        pointers = tl.multiple_of(pointers, [1, 16])
    bits = tl.load(pointers) if inside is None else tl.load(pointers, mask=inside, other=0)
    return bits.to(tl.int32)


@triton.jit
def _served(live, at, inside, CAST: tl.constexpr, NAN: tl.constexpr, ALIGNED: tl.constexpr):
    """Live elements as the bits that are served, sign-extended to int32; every NaN that is cast becomes NAN."""
    raw = _load(live, at, inside, 16 if CAST == 0 else 32, ALIGNED)
    if CAST == 2:  # round to nearest even
        bits = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
    elif CAST == 3:
        bits = raw.to(tl.float32, bitcast=True).to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32)
    else:
        bits = raw
    return tl.where((raw & 0x7FFFFFFF) > 0x7F800000, NAN, bits) if CAST > 1 else bits


@triton.jit
def _ordinal(bits, WIDTH: tl.constexpr):
    """The monotone map of delta_sync/bitmap.py; its low WIDTH bits count. ``bits`` is sign-extended."""
    return tl.where(bits < 0, ~bits, bits ^ (-(1 << (WIDTH - 1))))


@triton.jit
def _ones(byte):
    """How many of the 8 bits are set, int32."""
    pairs = byte - ((byte >> 1) & 0x55)
    fours = (pairs & 0x33) + ((pairs >> 2) & 0x33)
    return (fours + (fours >> 4)) & 0x0F


@triton.jit
def compare(
    pieces, piece_of, differing, counts, CAST: tl.constexpr, NAN: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program compares one tile: a bit for each element that changed, and how many there are.

    ``pieces``: int64 ``[n, 5]``, see PIECE. ``piece_of``: int32, each tile's piece. ``differing`` (int8) is
    ``[tiles, TILE / 8]``, the lowest bit for the first of eight elements; ``counts`` is int32 ``[tiles]``.
    """
    tile = tl.program_id(0)
    row = pieces + tl.load(piece_of + tile).to(tl.int64) * 5
    live, held, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    begin = (tile - tl.load(row + 3)) * TILE
    BYTES: tl.constexpr = BLOCK // 8
    byte, bit = tl.arange(0, BYTES), tl.arange(0, 8)[None, :]
    eights = byte[:, None] * 8 + bit
    out = differing + tile.to(tl.int64) * (TILE // 8) + byte
    changed = tl.zeros((BYTES,), tl.int32)
    for start in range(0, TILE, BLOCK):
        at = begin + start + eights
        if begin + start + BLOCK <= size:
            new, old = _served(live, at, None, CAST, NAN, ALIGNED), _load(held, at, None, WIDTH, ALIGNED)
        else:  # outside both are 0, the same
            new, old = _served(live, at, at < size, CAST, NAN, ALIGNED), _load(held, at, at < size, WIDTH, ALIGNED)
        bits = tl.sum((new != old).to(tl.int32) << bit, axis=1)
        tl.store(out + start // 8, bits.to(tl.int8))
        changed += _ones(bits)
    tl.store(counts + tile, tl.sum(changed))


@triton.jit(do_not_specialize=["first", "room"])
def gather(
    pieces, piece_of, differing, counts, ends, first, room, positions, steps,
    CAST: tl.constexpr, NAN: tl.constexpr, WIDTH: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Changes ``[first, first + room)`` of all tiles together, in order: positions in their tensors, and steps.

    ``ends``: int64, the changes up to each tile's end. ``positions`` (int64) and ``steps`` (signed) are ``[room]``.
    """
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    base = tl.load(ends + tile) - count - first
    if (base < room) & (base + count > 0) & (count > 0):
        row = pieces + tl.load(piece_of + tile).to(tl.int64) * 5
        live, held = tl.load(row), tl.load(row + 1)
        begin = (tile - tl.load(row + 3)) * TILE
        where = tl.load(row + 4) + begin
        byte = tl.arange(0, TILE // 8)
        left = tl.load(differing + tile.to(tl.int64) * (TILE // 8) + byte).to(tl.int32) & 0xFF
        ones = _ones(left)
        to = base + tl.cumsum(ones, 0) - ones
        for _ in range(0, tl.max(ones)):
            place = byte * 8 + _ones((left & -left) - 1)
            mask = (left != 0) & (to >= 0) & (to < room)
            new = _served(live, begin + place, mask, CAST, NAN, False)
            step = _ordinal(new, WIDTH) - _ordinal(_load(held, begin + place, mask, WIDTH, False), WIDTH)
            tl.store(positions + to, where + place, mask=mask)
            tl.store(steps + to, step.to(steps.dtype.element_ty), mask=mask)
            left &= left - 1
            to += 1
