"""Words with a bit for each of 64 elements say what numpy says."""

import numba
import numpy as np
import pytest

from delta_sync.lanes import below, first_ones, lowest, narrow, ones, place_of, unequal

compare = numba.njit(lambda one, other, at: unequal(one, other, at))
under = numba.njit(lambda values, first: below(values, first))
shortened = numba.njit(lambda bits, at, shift, mask, out: narrow(bits, at, shift, mask, out))
counted = numba.njit(lambda word: (ones(word), lowest(word)))
placed = numba.njit(lambda word, rank: place_of(word, rank))
low = numba.njit(lambda count: first_ones(count))


def word(flags):
    return int.from_bytes(np.packbits(flags, bitorder="little").tobytes(), "little")


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
@pytest.mark.parametrize("at", [0, 1, 7])  # nothing is aligned
def test_comparing_and_narrowing(kind, at):
    rng = np.random.default_rng(at)
    one = rng.integers(0, np.iinfo(kind).max, 80, dtype=kind, endpoint=True)
    other = np.where(rng.random(80) < 0.5, one, one ^ kind(1 << 7))
    assert compare(one, other, np.uint64(at)) == word((one != other)[at : at + 64])
    out, shift, mask = np.zeros(64, np.uint8), kind(3), kind(15)
    shortened(one, np.uint64(at), shift, mask, out)
    assert out.tolist() == ((one >> shift) & mask)[at : at + 64].tolist()


@pytest.mark.parametrize("first", [0, 1, 127, 128, 200, 255])
def test_below_compares_unsigned(first):
    values = np.random.default_rng(first).permutation(np.arange(256, dtype=np.uint8))[:64]
    assert under(values, np.uint8(first)) == word(values < first)


def test_places_of_set_bits():
    rng = np.random.default_rng(0)
    for share in (0.02, 0.5, 1):
        flags = rng.random(64) < share
        flags[-1] = True
        bits, places = np.uint64(word(flags)), np.flatnonzero(flags)
        assert counted(bits) == (places.size, places[0])
        assert [placed(bits, np.uint64(k)) for k in range(places.size)] == places.tolist()
    assert [low(np.uint64(n)) for n in (0, 1, 63, 64)] == [0, 1, 2**63 - 1, 2**64 - 1]
