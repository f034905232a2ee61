"""What changed since the snapshot, found on the GPU in one read of both: cast, compare, compact; then bring together.

Import this module only where Triton is installed (it comes with every CUDA build of PyTorch).
"""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl

TILE = 16384  # elements of a program; at most 2**16, as places within one are kept in 16 bits
ROOM = TILE // 8  # changes of a tile that are kept where they were found; a tile with more is read once more
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
        pointers = tl.multiple_of(pointers, [16])
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
def _compared(
    live, held, begin, size, CAST: tl.constexpr, NAN: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Which elements from ``begin`` on differ (int32 ``[BLOCK]``, 0 or 1), and by what step (its low WIDTH bits)."""
    at = begin + tl.arange(0, BLOCK)
    if begin + BLOCK <= size:
        new, old = _served(live, at, None, CAST, NAN, ALIGNED), _load(held, at, None, WIDTH, ALIGNED)
    else:  # outside both are 0, the same
        new, old = _served(live, at, at < size, CAST, NAN, ALIGNED), _load(held, at, at < size, WIDTH, ALIGNED)
    return (new != old).to(tl.int32), _ordinal(new, WIDTH) - _ordinal(old, WIDTH)


@triton.jit
def compare(
    pieces, piece_of, kept_places, kept_steps, counts, CAST: tl.constexpr, NAN: tl.constexpr, WIDTH: tl.constexpr,
    ALIGNED: tl.constexpr, TILE: tl.constexpr, ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program compares one tile: how many elements changed, and the first ROOM of them (place in the tile, step).

    ``pieces``: int64 ``[n, 5]``, see PIECE. ``piece_of``: int32, each tile's piece. ``kept_places`` (int16, unsigned)
    and ``kept_steps`` (signed, of WIDTH bits) are ``[tiles, ROOM]``, ``counts`` int32 ``[tiles]``.
    """
    tile = tl.program_id(0)
    row = pieces + tl.load(piece_of + tile).to(tl.int64) * 5
    live, held, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    begin = (tile - tl.load(row + 3)) * TILE
    slot = tile.to(tl.int64) * ROOM
    used = 0
    for start in range(0, TILE, BLOCK):
        differs, step = _compared(live, held, begin + start, size, CAST, NAN, WIDTH, ALIGNED, BLOCK)
        place = start + tl.arange(0, BLOCK)
        to = used + tl.cumsum(differs, 0) - differs
        mask = (differs != 0) & (to < ROOM)
        tl.store(kept_places + slot + to, place.to(tl.int16), mask=mask)
        tl.store(kept_steps + slot + to, step.to(kept_steps.dtype.element_ty), mask=mask)
        used += tl.sum(differs)
    tl.store(counts + tile, used)


@triton.jit(do_not_specialize=["first", "room"])
def gather(
    pieces, piece_of, kept_places, kept_steps, counts, ends, first, room, positions, steps,
    CAST: tl.constexpr, NAN: tl.constexpr, WIDTH: tl.constexpr, ALIGNED: tl.constexpr, TILE: tl.constexpr,
    ROOM: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Changes ``[first, first + room)`` of all tiles together, in order: positions in their tensors, and steps.

    ``ends``: int64, the changes up to each tile's end. ``positions`` (int64) and ``steps`` (signed) are ``[room]``.
    """
    tile = tl.program_id(0)
    count = tl.load(counts + tile)
    base = tl.load(ends + tile) - count - first
    wanted = (base < room) & (base + count > 0)
    row = pieces + tl.load(piece_of + tile).to(tl.int64) * 5
    begin = (tile - tl.load(row + 3)) * TILE
    at = tl.load(row + 4) + begin
    if wanted & (count <= ROOM):
        slot = tile.to(tl.int64) * ROOM
        for start in range(0, count, BLOCK):
            index = start + tl.arange(0, BLOCK)
            to = base + index
            mask = (index < count) & (to >= 0) & (to < room)
            place = tl.load(kept_places + slot + index, mask=mask, other=0).to(tl.int64) & 0xFFFF
            tl.store(positions + to, at + place, mask=mask)
            tl.store(steps + to, tl.load(kept_steps + slot + index, mask=mask, other=0), mask=mask)
    if wanted & (count > ROOM):
        live, held, size = tl.load(row), tl.load(row + 1), tl.load(row + 2)
        for start in range(0, TILE, BLOCK):
            differs, step = _compared(live, held, begin + start, size, CAST, NAN, WIDTH, ALIGNED, BLOCK)
            to = base + tl.cumsum(differs, 0) - differs
            mask = (differs != 0) & (to >= 0) & (to < room)
            tl.store(positions + to, at + start + tl.arange(0, BLOCK), mask=mask)
            tl.store(steps + to, step.to(steps.dtype.element_ty), mask=mask)
            base += tl.sum(differs)
