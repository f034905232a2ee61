"""Tensors replaced rather than trained: their deltas take no more than their elements, and stay ULP steps."""

import numpy as np
import pytest

from delta_sync import DTYPES, DeltaHeader, FormatError, apply, decode_delta, diff, encode_delta
from delta_sync.codec import Group, codec_named
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, decode_against, encode_against
from delta_sync.gap_codec import DEFAULT_CODEC, PLANE_CODEC, codec_without_base
from delta_sync.limits import DEFAULT_LIMITS

HEADER = DeltaHeader("run", 2, 1, DEFAULT_CODEC)
ROOM = 1024  # for header and frames


def drawn(dtype, seed, scale=0.02, size=50_000):
    """Weights as a model starts with, or any bits of types that numpy has no floats of."""
    rng = np.random.default_rng(seed)
    if dtype.name == "BF16":
        return (rng.normal(0, scale, size).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.name == "F32":
        return rng.normal(0, scale, size).astype(np.float32).view(np.uint32)
    return rng.integers(0, 2 ** (8 * dtype.itemsize), size).astype(dtype.carrier)


@pytest.mark.parametrize("name", DTYPES)
def test_another_tensor_takes_no_more_than_its_elements(name):
    dtype = DTYPES[name]
    old, new = drawn(dtype, 1), drawn(dtype, 2)
    header, data, deltas = encode_against(HEADER, [Change("w", dtype, old.shape, old, new)])
    plain = codec_without_base(deltas)
    assert (plain == PLANE_CODEC) == (dtype.itemsize > 1)
    assert header.codec in (plain, CONTEXT_CODEC)
    smallest = min(len(encode_delta(DeltaHeader("run", 2, 1, codec), deltas)) for codec in (DEFAULT_CODEC, plain))
    assert len(data) <= smallest
    if dtype.itemsize > 1:
        assert len(data) <= old.nbytes + ROOM
    [got] = decode_against(data, lambda *_: old)[1]
    assert got.encoding == "ulp"
    bits = old.copy()
    apply(got, bits)
    assert np.array_equal(bits, new)


@pytest.mark.parametrize("codec", [DEFAULT_CODEC, PLANE_CODEC])
def test_either_codec_holds_any_delta(codec):
    dtype = DTYPES["BF16"]
    old, new = drawn(dtype, 1, size=1000), drawn(dtype, 2, size=1000)
    new[::3] = old[::3]
    delta = diff("w", dtype, (10, 100), old, new)
    header, [got] = decode_delta(encode_delta(DeltaHeader("run", 2, 1, codec), [delta]))
    assert header.codec == codec
    assert np.array_equal(got.positions, delta.positions) and np.array_equal(got.values, delta.values)


def test_trained_weights_are_not_coded_in_planes():
    dtype = DTYPES["BF16"]
    old = drawn(dtype, 1)
    new = old.copy()
    new[::100] += np.uint16(1)
    assert codec_without_base([diff("w", dtype, old.shape, old, new)]) == DEFAULT_CODEC
    assert codec_without_base([]) == DEFAULT_CODEC


def test_a_step_of_zero_in_planes_is_refused():
    """Made by the codec itself, which believes its caller, as ``encode_delta`` does not."""
    codec, group = codec_named(PLANE_CODEC), Group("group 0", "ulp", DTYPES["BF16"], (1,), (9,))
    streams = codec.encode(group, np.array([4]), np.array([0], np.uint16))
    with pytest.raises(FormatError, match="no step of zero"):
        codec.join(group, codec.unpack(group, {name: memoryview(d) for name, d in streams.items()}, DEFAULT_LIMITS))
