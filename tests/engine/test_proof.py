"""The proof: ranks' sums must lead to the published digests exactly, and regions must cover every tensor once."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync.cover import check_cover
from delta_sync.digest import digest_region, state_digest, tensor_key
from delta_sync.errors import IntegrityError, MappingError
from delta_sync.manifest import TensorState
from vllm_delta_plugin.proof import MASK, Layout, Region, prove

SHAPE = (6, 8)
NAME = "layers.0|odd.weight"  # a name may hold the separator


def key(offset: int, strides: tuple[int, ...], shape: tuple[int, ...], name: str = NAME) -> str:
    return f"{name}|{offset}|{strides}|{shape}"


LEFT, RIGHT = key(0, (8, 1), (6, 4)), key(4, (8, 1), (6, 4))
NORM = key(0, (1,), (8,), "norm")
TENSORS = {NAME: ("BF16", SHAPE), "norm": ("BF16", (8,))}


def layout() -> Layout:
    return Layout(TENSORS, [[LEFT, NORM], [RIGHT, NORM]])


def sums(bits: np.ndarray, region: str, name: str) -> int:
    parsed = Region.parse(region)
    return digest_region(
        bits.ravel(), parsed.offset, parsed.strides, parsed.offset, parsed.strides, parsed.shape, tensor_key(name)
    )


def state(weight: np.ndarray, norm: np.ndarray) -> dict[str, TensorState]:
    whole = (sums(weight, LEFT, NAME) + sums(weight, RIGHT, NAME)) & MASK
    return {
        NAME: TensorState("BF16", SHAPE, whole),
        "norm": TensorState("BF16", (8,), sums(norm, NORM, "norm")),
    }


def change(old: np.ndarray, new: np.ndarray, region: str, name: str) -> int:
    return (sums(new, region, name) - sums(old, region, name)) & MASK


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), flips=st.integers(0, 48))
def test_true_changes_of_all_ranks_are_accepted_and_any_flipped_bit_is_not(seed: int, flips: int) -> None:
    random = np.random.default_rng(seed)
    old_w, old_n = random.integers(0, 2**16, SHAPE, np.uint16), random.integers(0, 2**16, 8, np.uint16)
    new_w, new_n = old_w.copy(), old_n.copy()
    new_w.ravel()[random.choice(48, flips, replace=False)] += 1
    new_n[seed % 8] ^= 1 << (seed % 16)
    after = state(new_w, new_n)
    bases = [{LEFT: sums(old_w, LEFT, NAME), NORM: sums(old_n, NORM, "norm")}]
    bases.append({RIGHT: sums(old_w, RIGHT, NAME), NORM: bases[0][NORM]})
    norm = {NORM: change(old_n, new_n, NORM, "norm")}
    parts = [
        {LEFT: change(old_w, new_w, LEFT, NAME), **norm},
        {RIGHT: change(old_w, new_w, RIGHT, NAME), **norm},
    ]
    proven = prove(layout(), bases, parts, after, state_digest(after))
    assert proven.digests == {n: s.digest for n, s in after.items()}
    assert proven.state == state_digest(after)

    wrong = new_w.copy()
    wrong[seed % 6, 7] ^= 1
    parts[1][RIGHT] = change(old_w, wrong, RIGHT, NAME)
    with pytest.raises(IntegrityError, match="staged tensor"):
        prove(layout(), bases, parts, after, state_digest(after))


def bases_of(left: int = 0, right: int = 0, norm: tuple[int, int] = (0, 0)) -> list[dict[str, int]]:
    return [{LEFT: left, NORM: norm[0]}, {RIGHT: right, NORM: norm[1]}]


def test_replicated_regions_count_once_and_must_agree() -> None:
    assert layout().combine(bases_of(1, 2, (5, 5))) == {NAME: 3, "norm": 5}
    with pytest.raises(IntegrityError, match="copies of region"):
        layout().combine(bases_of(norm=(5, 6)))


def test_copies_that_differ_may_become_equal_again() -> None:
    """An anchor is staged against each rank's own bits."""
    target = {n: TensorState(d, s, 9) for n, (d, s) in TENSORS.items()}
    changes = [{LEFT: 9, NORM: 4}, {NORM: 3}]
    assert prove(layout(), bases_of(norm=(5, 6)), changes, target, state_digest(target)).digests["norm"] == 9


def test_a_rank_that_forgets_a_copy_disagrees() -> None:
    target = {n: TensorState(d, s, 5) for n, (d, s) in TENSORS.items()}
    with pytest.raises(IntegrityError, match="copies of region"):
        prove(layout(), bases_of(5), [{NORM: 5}, {}], target, state_digest(target))


def test_a_rank_can_only_speak_about_regions_it_holds() -> None:
    with pytest.raises(IntegrityError, match="rank 1"):
        layout().after(bases_of(), [{}, {LEFT: 1}])
    with pytest.raises(IntegrityError, match="rank 0"):
        layout().combine([{LEFT: 0}, {RIGHT: 0, NORM: 0}])


def test_sums_wrap_around() -> None:
    assert layout().combine(bases_of(MASK, 2))[NAME] == 1
    assert layout().after(bases_of(MASK), [{LEFT: 3}, {}])[0][LEFT] == 2


def test_the_whole_state_must_match_too() -> None:
    """Every touched tensor is right, yet an untouched one is not what the trainer has, or is changed unasked."""
    target = {NAME: TensorState("BF16", SHAPE, 7), "norm": TensorState("BF16", (8,), 1)}
    for bases, changes in ((bases_of(norm=(2, 2)), [{LEFT: 7}, {}]), (bases_of(), [{LEFT: 7, NORM: 2}, {NORM: 2}])):
        with pytest.raises(IntegrityError, match="staged state"):
            prove(layout(), bases, changes, {NAME: target[NAME]}, state_digest(target))


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ({"stranger": TensorState("BF16", (1,), 0)}, "stranger.*not in the served model"),
        ({"norm": TensorState("F32", (8,), 0)}, "norm.*F32"),
        ({"norm": TensorState("BF16", (4, 2), 0)}, r"norm.*\(4, 2\)"),
    ],
)
def test_another_model_is_named(wanted: dict[str, TensorState], message: str) -> None:
    with pytest.raises(MappingError, match=message):
        prove(layout(), bases_of(), [{}, {}], wanted, "")


@pytest.mark.parametrize(
    "regions",
    [
        [key(0, (1,), (48,))],
        [LEFT, RIGHT],
        [key(0, (8, 1), (3, 8)), key(24, (1,), (24,))],
        [key(0, (1, 8), (8, 6))],  # transposed
        [key(0, (16, 2, 1), (3, 4, 2)), key(8, (16, 1), (3, 8))],  # every other row, rows split in pairs
        [key(0, (2,), (24,)), key(1, (2,), (24,))],  # interleaved
        [key(0, (8, 1), (6, 4)), key(4, (8, 4, 1), (6, 1, 4))],
    ],
)
def test_covers(regions: list[str]) -> None:
    check_cover(NAME, SHAPE, [Region.parse(r) for r in regions])


@pytest.mark.parametrize(
    "regions",
    [
        [],
        [LEFT],
        [LEFT, key(3, (8, 1), (6, 5))],  # overlap
        [key(0, (1,), (49,))],  # past the end
        [key(0, (2,), (24,)), key(0, (2,), (24,))],
        [key(0, (8, 1), (6, 4)), key(4, (8, 1), (5, 4)), key(0, (1,), (4,))],  # right count, one hole, one overlap
    ],
)
def test_gaps_and_overlaps_are_refused(regions: list[str]) -> None:
    with pytest.raises(MappingError, match="exactly once"):
        check_cover(NAME, SHAPE, [Region.parse(r) for r in regions])


def test_empty_and_scalar_tensors_are_covered() -> None:
    check_cover("s", (), [Region.parse(key(0, (), (), "s"))])
    check_cover("e", (0, 4), [])
    check_cover("e", (0, 4), [Region.parse(key(0, (4, 1), (0, 4), "e"))])


@pytest.mark.parametrize("bad", ["", "w", "w|0|1|1", "w|x|(1,)|(1,)", "w|0|(1,)|(1,)x", "w|0|[1, 'a']|(1, 2)"])
def test_a_malformed_region_key_is_named(bad: str) -> None:
    with pytest.raises(MappingError, match="region key"):
        Region.parse(bad)
