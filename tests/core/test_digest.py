"""The additive digest against a definition spelled out in Python integers, and its sums over parts."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync import (
    DTYPES,
    FormatError,
    MappingError,
    TensorState,
    digest_change,
    digest_region,
    model_fingerprint,
    state_digest,
    tensor_key,
)
from delta_sync.digest import digest, mix

WORD = 2**64


def factor(key: int, position: int) -> int:
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % WORD
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % WORD
    z = (z ^ z >> 27) * 0x94D049BB133111EB % WORD
    return (z ^ z >> 31) | 1


def slow_digest(bits: np.ndarray, key: int, start: int = 0) -> int:
    return sum(factor(key, start + i) * int(b) for i, b in enumerate(bits.reshape(-1))) % WORD


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), size=st.integers(0, 200), start=st.integers(0, 2**44))
def test_definition(dtype, seed, size, start):
    rng = np.random.default_rng(seed)
    bits = rng.integers(0, 2 ** (8 * dtype.itemsize), size, dtype=np.uint64).astype(dtype.carrier)
    key = int(rng.integers(0, WORD, dtype=np.uint64))
    assert digest(bits, key, start) == slow_digest(bits, key, start)
    assert mix(key, np.arange(start, start + 3)).tolist() == [factor(key, start + i) for i in range(3)]


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32), cut=st.integers(0, 100))
def test_parts_and_changes_add_up(seed, cut):
    rng = np.random.default_rng(seed)
    old, new = (rng.integers(0, 2**16, 100).astype(np.uint16) for _ in range(2))
    key = tensor_key("w")
    assert (digest(old[:cut], key) + digest(old[cut:], key, cut)) % WORD == digest(old, key)
    at = np.arange(100)
    assert (digest(old, key) + digest_change(at, old, new, key)) % WORD == digest(new, key)


@settings(deadline=None, max_examples=100)
@given(data=st.data())
def test_regions_against_numpy_views(data):
    """A region is a numpy view of the storage and of the positions with the same index."""
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=0, max_size=5))
    order = data.draw(st.permutations(range(len(sizes))))
    key = data.draw(st.integers(0, WORD - 1))
    full = tuple(n + 1 for n in sizes)
    window = tuple(slice(data.draw(st.integers(0, 1)), None, data.draw(st.integers(1, 2))) for _ in sizes)
    storage = np.random.default_rng(key).integers(0, 2**16, int(np.prod(full, dtype=int))).astype(np.uint16)
    at = np.arange(storage.size).reshape(full)[window].transpose(order)
    positions = 5 + np.arange(storage.size).reshape(full, order="F")[window].transpose(order)

    got = digest_region(storage, *affine(at), *affine(positions), at.shape, key)
    pairs = zip(positions.reshape(-1), at.reshape(-1), strict=True)
    assert got == sum(factor(key, int(p)) * int(storage[a]) for p, a in pairs) % WORD


def affine(index: np.ndarray) -> tuple[int, list[int]]:
    """Offset and strides of an array whose values are affine in its index; an axis of length 1 has any stride."""
    first = index[(slice(0, 1),) * index.ndim].item()
    steps = [np.diff(index, axis=axis).reshape(-1)[:1].tolist() for axis in range(index.ndim)]
    return first, [step[0] if step else 99 for step in steps]


def test_a_region_is_part_of_its_tensor():
    bits = np.arange(12, dtype=np.uint16)
    key = tensor_key("w")
    rows = [digest_region(bits[4 * r : 4 * r + 4], 0, (1,), 4 * r, (1,), (4,), key) for r in range(3)]
    columns = [digest_region(bits, c, (4,), c, (4,), (3,), key) for c in range(4)]
    assert sum(rows) % WORD == sum(columns) % WORD == digest(bits, key)
    assert digest_region(bits, 0, (4, 1), 0, (4, 1), (0, 4), key) == 0


@pytest.mark.parametrize(
    "arguments",
    [(0, (1,), 0, (1,), (13,)), (11, (1,), 0, (1,), (2,)), (0, (-1,), 5, (1,), (2,)), (0, (1,), 0, (-1,), (2,))],
)
def test_regions_outside_the_storage_are_refused(arguments):
    with pytest.raises(MappingError, match="digest region, expected elements within the storage"):
        digest_region(np.zeros(12, np.uint16), *arguments, 1)


def test_ranks_must_agree():
    with pytest.raises(MappingError, match="equal ranks"):
        digest_region(np.zeros(12, np.uint16), 0, (1,), 0, (1, 1), (1,), 1)
    with pytest.raises(FormatError, match="as many old and new bits as positions"):
        digest_change(np.arange(2), np.zeros(2, np.uint16), np.zeros(3, np.uint16), 1)


def test_state_digest_is_sha256_over_sorted_lines():
    tensors = {"é": TensorState("BF16", (2, 3), 255), "a": TensorState("F32", (), 2**64 - 1)}
    lines = b"a\0F32\0\0ffffffffffffffff\n" + "é\0BF16\0".encode() + b"2,3\0" + b"00000000000000ff\n"
    assert state_digest(tensors) == hashlib.sha256(lines).hexdigest()
    bare = b"a\0F32\0\n" + "é\0BF16\0".encode() + b"2,3\n"
    assert model_fingerprint(tensors) == hashlib.sha256(bare).hexdigest()
