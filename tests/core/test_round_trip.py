"""apply(decode(encode(diff(old, new))), old) == new, bit for bit, for every dtype and any bits."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync import DEFAULT_CODEC, DTYPES, DeltaHeader, apply, decode_delta, diff, encode_delta, raw
from delta_sync.dtypes import DType

HEADER = DeltaHeader("run", 7, 6, DEFAULT_CODEC)
SPECIAL = {
    "BF16": [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF, 0x0001, 0x8001, 0x007F, 0x7F7F],
    "F16": [0x0000, 0x8000, 0x7C00, 0xFC00, 0x7E00, 0x7C01, 0xFFFF, 0x0001, 0x8001, 0x03FF, 0x7BFF],
    "F32": [0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000001, 0x7FFFFF],
    "F8_E4M3": [0x00, 0x80, 0x7F, 0xFF, 0x7E, 0xFE, 0x01, 0x81],
    "F8_E5M2": [0x00, 0x80, 0x7C, 0xFC, 0x7F, 0xFF, 0x7D, 0x01],
    "I8": [0x00, 0x80, 0x7F, 0xFF],
    "U8": [0x00, 0x80, 0x7F, 0xFF],
}


@st.composite
def pairs(draw: st.DrawFn, dtype: DType) -> tuple[np.ndarray, np.ndarray]:
    """Old and new bits: random, special, and mixed between equal, near and unrelated."""
    top = 2 ** (8 * dtype.itemsize) - 1
    bits = st.one_of(st.sampled_from(SPECIAL[dtype.name]), st.integers(0, top))
    old = draw(st.lists(bits, max_size=700))
    change = draw(st.lists(st.one_of(st.just(0), st.sampled_from([1, top, 127, 128, 129]), bits), max_size=700))
    new = [(o + c) % (top + 1) for o, c in zip(old, [*change, *[0] * len(old)], strict=False)]
    return np.array(old, dtype.carrier), np.array(new, dtype.carrier)


def through_a_file(*deltas):
    return decode_delta(encode_delta(HEADER, deltas))[1]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_change_survives(dtype, data):
    old, new = data.draw(pairs(dtype))
    (delta,) = through_a_file(diff("w", dtype, old.shape, old, new))
    got = old.copy()
    apply(delta, got)
    assert got.tobytes() == new.tobytes()
    assert delta.changed == int((old != new).sum())


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_special_value_turns_into_every_other(dtype):
    special = np.array(SPECIAL[dtype.name], dtype.carrier)
    old, new = np.repeat(special, special.size), np.tile(special, special.size)
    (delta,) = through_a_file(diff("w", dtype, (special.size, special.size), old, new))
    apply(delta, old)
    assert old.tobytes() == new.tobytes()


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(deadline=None, max_examples=30)
@given(data=st.data())
def test_raw_values_survive(dtype, data):
    old, new = data.draw(pairs(dtype))
    at = np.flatnonzero(old != new).astype(np.int64)
    (delta,) = through_a_file(raw("w", dtype, old.shape, at, new[at]))
    apply(delta, old)
    assert old.tobytes() == new.tobytes()


def test_gaps_of_every_length():
    dtype = DTYPES["BF16"]
    gaps = [0, 1, 254, 255, 256, 509, 510, 511, 2**16, 2**21, 2**28]
    at = np.cumsum(np.array(gaps, np.int64) + 1) - 1
    delta = raw("w", dtype, (2**44,), at, np.arange(at.size, dtype=np.uint16))
    (got,) = through_a_file(delta)
    np.testing.assert_array_equal(got.positions, at)


def test_no_tensor_and_no_change():
    assert through_a_file() == []
    dtype = DTYPES["F32"]
    empty, same = np.empty(0, np.uint32), np.arange(5, dtype=np.uint32)
    deltas = through_a_file(diff("a", dtype, (0, 3), empty, empty), diff("b", dtype, (5,), same, same))
    assert [(d.name, d.shape, d.changed) for d in deltas] == [("a", (0, 3), 0), ("b", (5,), 0)]
