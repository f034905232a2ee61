"""Every layout of the benchmark restores every bit, and its figures are what the bytes say."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from layouts import LAYOUTS, changed_elements
from wire_layouts import compare


def changes_of(rate: float, elements: int = 200_000):
    rng = np.random.default_rng(3)
    changes = []
    for name, size in (("a", elements), ("untouched", 1000), ("sparse", 300_000)):
        old = rng.integers(0, 2**16, size).astype(np.uint16)
        new = old.copy()
        share = {"a": rate, "untouched": 0, "sparse": 4 / size}[name]
        at = rng.random(size) < share
        new[at] += rng.choice(np.array([1, 65535, 2, 300], np.uint16), int(at.sum()), p=[0.45, 0.45, 0.09, 0.01])
        changes.append(changed_elements(name, (size,), old, new))
    return changes


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name.split(":")[0])
@pytest.mark.parametrize("rate", [0.001, 0.05])
def test_layouts_restore_every_bit(layout, rate):
    changes = changes_of(rate)
    for c, (positions, bits) in zip(changes, layout.decode(layout.encode(changes), changes), strict=True):
        np.testing.assert_array_equal(positions, c.positions)
        np.testing.assert_array_equal(bits, c.new)


def test_ours_is_the_smallest_and_trls_takes_six_bytes():
    result = compare(changes_of(0.006), 501_000)
    sizes = {row["layout"].split(":")[0]: row["bytes_per_changed"] for row in result["layouts"]}
    assert sizes["TRL"] == 6
    assert sizes["ours"] == min(sizes.values())
    assert result["ours_over_trl"] == pytest.approx(sizes["ours"] / 6, abs=1e-4)
    assert sizes["ours"] <= 0.35 * 6
