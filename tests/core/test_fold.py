"""A folded chain does what its deltas do one after the other."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync import DTYPES, FormatError, apply, diff, fold, raw


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 60), kinds=st.lists(st.booleans(), min_size=1, max_size=9))
def test_fold_equals_sequential_apply(dtype, seed, size, kinds):
    rng = np.random.default_rng(seed)
    live = rng.integers(0, 256, size).astype(dtype.carrier)
    start, deltas = live.copy(), []
    for is_raw in kinds:
        changed = np.flatnonzero(rng.random(size) < 0.4).astype(np.int64)
        new = live.copy()
        new[changed] += rng.choice(np.array([0, 1, -1, 77]), changed.size).astype(dtype.carrier)
        deltas.append(
            raw("w", dtype, (size,), changed, new[changed]) if is_raw else diff("w", dtype, (size,), live, new)
        )
        apply(deltas[-1], live)
    folded = fold(deltas)
    for delta in folded:
        apply(delta, start)
    assert start.tobytes() == live.tobytes()
    assert len({d.encoding for d in folded}) == len(folded) <= 2
    assert all((d.values != 0).all() for d in folded if d.encoding == "ulp")
    positions = np.concatenate([d.positions for d in folded]) if folded else np.empty(0)
    assert np.unique(positions).size == positions.size


def test_steps_that_cancel_leave_nothing():
    dtype = DTYPES["BF16"]
    a, b = np.array([1, 2, 3], np.uint16), np.array([1, 5, 0x8000], np.uint16)
    assert fold([diff("w", dtype, (3,), a, b), diff("w", dtype, (3,), b, a)]) == []


def test_nothing_folds_to_nothing():
    assert fold([]) == []


def test_tensors_are_not_mixed():
    bits = np.zeros(3, np.uint16)
    deltas = [diff(name, DTYPES["BF16"], (3,), bits, bits) for name in ("a", "b")]
    with pytest.raises(FormatError, match=r"expected a BF16 \[3\], got b BF16 \[3\]. Remedy: fold each tensor"):
        fold(deltas)
