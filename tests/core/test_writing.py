"""Writers refuse what readers would refuse, and name what is wrong."""

import numpy as np
import pytest
import safetensors.numpy

from delta_sync import (
    DEFAULT_CODEC,
    DTYPES,
    DeltaHeader,
    FormatError,
    TensorDelta,
    apply,
    decode_delta,
    diff,
    encode_delta,
    new_bits,
    raw,
)
from delta_sync import codec as codecs
from delta_sync.codec import Codec, codec_named, register
from delta_sync.gap_codec import GapCodec

BF16 = DTYPES["BF16"]
HEADER = DeltaHeader("run", 1, 0, DEFAULT_CODEC)


def positions(*values):
    return np.array(values, np.int64)


def bits(*values):
    return np.array(values, np.uint16)


BAD_DELTAS = {
    "out of order": (raw, positions(3, 2), bits(1, 1), "strictly increasing positions below 10, got 2 at index 1"),
    "twice": (raw, positions(3, 3), bits(1, 1), "strictly increasing positions below 10, got 3 at index 1"),
    "negative": (raw, positions(-1, 3), bits(1, 1), "strictly increasing positions below 10, got -1 at index 0"),
    "beyond": (raw, positions(3, 10), bits(1, 1), "strictly increasing positions below 10, got 10 at index 1"),
    "int32": (raw, positions(3).astype(np.int32), bits(1), r"positions, expected int64 \[n\], got int32 \[1\]"),
    "signed values": (raw, positions(3), bits(1).view(np.int16), r"values, expected uint16 \[1\], got int16 \[1\]"),
    "fewer values": (raw, positions(3, 4), bits(1), r"values, expected uint16 \[2\], got uint16 \[1\]"),
}


@pytest.mark.parametrize("make,at,values,message", BAD_DELTAS.values(), ids=BAD_DELTAS)
def test_malformed_deltas(make, at, values, message):
    with pytest.raises(FormatError, match=message):
        make("w", BF16, (10,), at, values)
    unchecked = TensorDelta("w", BF16, (10,), "raw", at, values)
    live = np.zeros(10, np.uint16)
    for use in (lambda: encode_delta(HEADER, [unchecked]), lambda: apply(unchecked, live)):
        with pytest.raises(FormatError, match=message):
            use()
    assert not live.any()


def test_a_step_of_zero_is_not_written():
    delta = TensorDelta("w", BF16, (10,), "ulp", positions(1, 2), bits(1, 0))
    with pytest.raises(FormatError, match="expected ULP steps other than 0, got a step of 0"):
        encode_delta(HEADER, [delta])


def test_one_position_in_both_encodings_is_not_written():
    both = [
        TensorDelta("w", BF16, (10,), "ulp", positions(1, 4), bits(1, 1)),
        TensorDelta("w", BF16, (10,), "raw", positions(0, 4), bits(1, 1)),
    ]
    with pytest.raises(FormatError, match="tensor 'w', expected each position in one encoding, got one in both"):
        encode_delta(HEADER, both)


BAD_HEADERS = {
    "reserved key": (DeltaHeader("r", 1, 0, DEFAULT_CODEC, {"codec": "x"}), r"extra, expected keys other than"),
    "not text": (DeltaHeader("r", 1, 0, DEFAULT_CODEC, {"x": "\ud800"}), "object of Unicode strings"),
    "not a string": (DeltaHeader("r", 1, 0, DEFAULT_CODEC, {"x": 1}), "object of Unicode strings"),
    "base not before": (DeltaHeader("r", 1, 1, DEFAULT_CODEC), "base_version, expected less than version 1, got 1"),
    "unknown codec": (DeltaHeader("r", 1, 0, "zip"), "codec, expected one of"),
    "negative": (DeltaHeader("r", 1, -1, DEFAULT_CODEC), "base_version, expected a plain decimal number"),
}


@pytest.mark.parametrize("header,message", BAD_HEADERS.values(), ids=BAD_HEADERS)
def test_bad_headers_are_not_written(header, message):
    with pytest.raises(FormatError, match=message):
        encode_delta(header, [])


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "\ud800", "n" * 1025])
def test_bad_names_are_not_written(name):
    with pytest.raises(FormatError, match="tensor name, expected 1 to 1024 bytes"):
        encode_delta(HEADER, [raw(name, BF16, (1,), positions(0), bits(1))])


def test_bits_must_fit_the_tensor():
    delta = raw("w", BF16, (10,), positions(0), bits(1))
    for wrong in (np.zeros(9, np.uint16), np.zeros(10, np.int16), np.zeros(20, np.uint16)[::2]):
        with pytest.raises(FormatError, match="bits of w, expected contiguous uint16 of 10 elements"):
            apply(delta, wrong)
    with pytest.raises(FormatError, match=r"bits of w, expected uint16 of shape \[10\], got uint16 \[9\]"):
        diff("w", BF16, (10,), np.zeros(10, np.uint16), np.zeros(9, np.uint16))
    with pytest.raises(FormatError, match="old bits of w at its changed positions"):
        new_bits(diff("w", BF16, (2,), bits(1, 2), bits(1, 3)), bits(1, 2))


def test_new_bits_are_those_that_apply_writes():
    old, new = bits(0, 0x8000, 5, 0xFFFF), bits(0x8000, 0, 5, 0x7FFF)
    delta = diff("w", BF16, (4,), old, new)
    assert new_bits(delta, old[delta.positions]).tolist() == new[delta.positions].tolist()
    absolute = raw("w", BF16, (4,), delta.positions, new[delta.positions])
    assert new_bits(absolute, old[delta.positions]).tolist() == new[delta.positions].tolist()


def test_notes_in_the_header_come_back():
    header = DeltaHeader("run é", 10**17, 3, DEFAULT_CODEC, {"note": '\n\0"\\é'})
    assert decode_delta(encode_delta(header, [])) == (header, [])


def test_safetensors_itself_reads_the_container():
    data = encode_delta(HEADER, [diff("w", BF16, (2,), bits(1, 2), bits(1, 3))])
    streams = safetensors.numpy.load(data)
    assert set(streams) == {"0.gap", "0.step", "0.step_ext", "0.sign"}


def test_many_tensors_make_several_groups(monkeypatch):
    monkeypatch.setattr("delta_sync.delta_file._GROUP_ELEMENTS", 10)
    deltas = [raw(f"w{i}", BF16, (99,), np.arange(i, dtype=np.int64), np.arange(i, dtype=np.uint16)) for i in range(9)]
    deltas[3] = diff("w3", BF16, (3,), bits(1, 2, 3), bits(3, 2, 1))
    data = encode_delta(HEADER, deltas)
    assert b'"4.gap"' in data
    back = {delta.name: delta for delta in decode_delta(data)[1]}
    assert set(back) == {delta.name for delta in deltas}
    for delta in deltas:
        got = back[delta.name]
        assert (got.dtype, got.shape, got.encoding) == (delta.dtype, delta.shape, delta.encoding)
        assert got.positions.tolist() == delta.positions.tolist()
        assert got.values.tolist() == delta.values.tolist()


def test_a_new_codec_joins_by_name(monkeypatch):
    class Renamed(GapCodec):
        name = "test-codec"

    monkeypatch.setattr(codecs, "_CODECS", dict(codecs._CODECS))
    register(Renamed())
    delta = raw("w", BF16, (10,), positions(3), bits(1))
    header, (back,) = decode_delta(encode_delta(DeltaHeader("run", 1, 0, "test-codec"), [delta]))
    assert (header.codec, back.values.tolist()) == ("test-codec", [1])
    assert isinstance(codec_named(DEFAULT_CODEC), Codec)
