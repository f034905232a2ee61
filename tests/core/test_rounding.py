"""float32 weights compared with bfloat16 bits in one pass: the same delta as rounding first and comparing then."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync.delta import diff
from delta_sync.dtypes import dtype
from delta_sync.errors import FormatError
from delta_sync.rounding import BF16, diff_rounded

INFINITY, SIGN = 0x7F800000, 0x80000000
LARGEST, SMALLEST = 0x7F7FFFFF, 0x00800000  # of the normal numbers


def rounded(bits: np.ndarray) -> np.ndarray:
    """To nearest, ties to even, by way of wider numbers: the two neighbours, and which is nearer."""
    wide = bits.astype(np.uint64)
    low, rest = wide >> 16, wide & 0xFFFF
    return (low + ((rest > 0x8000) | ((rest == 0x8000) & (low & 1 == 1)))).astype("<u2")


def some_weights(size: int, seed: int) -> np.ndarray:
    """Bits of normal numbers of both signs, many of them halfway between two that bfloat16 has."""
    rng = np.random.default_rng(seed)
    bits = rng.integers(SMALLEST, LARGEST, size, np.uint32, endpoint=True)
    bits[rng.random(size) < 0.3] &= np.uint32(0xFFFF0000)
    bits[rng.random(size) < 0.3] |= np.uint32(0x8000)
    return bits | (rng.integers(0, 2, size, np.uint32) << 31)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 128, 1000, 4096])
@pytest.mark.parametrize("share", [0.0, 0.01, 1.0])
def test_it_is_the_delta_of_the_rounded_bits(size: int, share: float) -> None:
    bits = some_weights(size, seed=size)
    edges = np.array([0, SIGN, INFINITY, INFINITY | SIGN, LARGEST, SMALLEST, 0x3F808000, 0x3F818000], "<u4")
    bits[: min(size, 8)] = edges[:size]
    old = rounded(bits)
    flips = np.random.default_rng(1).random(size) < share
    old[flips] ^= np.uint16(1)
    expected = diff("t", BF16, (size,), old, rounded(bits))
    found = diff_rounded("t", (size,), old, bits.view("<f4"))
    assert found is not None and found.changed == int(flips.sum())
    np.testing.assert_array_equal(found.positions, expected.positions)
    np.testing.assert_array_equal(found.values, expected.values)


@settings(deadline=None, max_examples=100)
@given(st.lists(st.sampled_from([0, SIGN, INFINITY]) | st.integers(SMALLEST, LARGEST), min_size=1, max_size=130))
def test_any_number_rounds_to_its_nearest(weights: list[int]) -> None:
    bits = np.array(weights, "<u4")
    found = diff_rounded("t", bits.shape, rounded(bits), bits.view("<f4"))
    assert found is not None and found.changed == 0


@pytest.mark.parametrize("odd", [1, SMALLEST - 1, SIGN | 1, INFINITY + 1, 0x7FC00000, 0xFFFFFFFF])
@pytest.mark.parametrize("at", [0, 70, 129])  # in a block, and in what is left of one
def test_what_machines_round_differently_is_left_to_the_caller(odd: int, at: int) -> None:
    bits = some_weights(130, seed=3)
    old = rounded(bits)
    bits[at] = odd
    assert diff_rounded("t", (130,), old, bits.view("<f4")) is None


def test_torch_rounds_alike() -> None:
    torch = pytest.importorskip("torch")
    bits = some_weights(10_000, seed=5)
    bits[:4] = [0, SIGN, INFINITY, SIGN | INFINITY]
    cast = torch.from_numpy(bits.view("<f4")).to(torch.bfloat16).view(torch.int16).numpy().view("<u2")
    found = diff_rounded("t", bits.shape, cast, bits.view("<f4"))
    assert found is not None and found.changed == 0


def test_other_types_and_sizes_are_refused() -> None:
    old = np.zeros(4, "<u2")
    with pytest.raises(FormatError, match="weights of t"):
        diff_rounded("t", (4,), old, np.zeros(5, "<f4"))
    with pytest.raises(FormatError, match="weights of t"):
        diff_rounded("t", (4,), old, np.zeros(4, "<f8"))
    with pytest.raises(FormatError):
        diff_rounded("t", (4,), old.astype("<u4"), np.zeros(4, "<f4"))
    assert dtype("BF16") == BF16
