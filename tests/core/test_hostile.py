"""Files that lie: each lie is a FormatError that names the object, what was expected and what was got."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
import zstandard
from forge import container, contents, delta_object, entries, framed, group, metadata, row
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_sync import DEFAULT_LIMITS, DTYPES, DeltaHeader, FormatError, decode_delta, diff, encode_delta, raw

MiB = 1024**2
LONG = "9" * 5000


def test_the_forge_is_honest_when_it_does_not_lie():
    header, (delta,) = decode_delta(delta_object())
    assert (header.run, header.version, header.base_version, header.extra) == ("run", 7, 6, {})
    assert delta.positions.tolist() == [0, 2, 5]
    assert delta.values.tolist() == [1, 0xFFFF, 2]


def text_with(pair: str) -> str:
    """The honest header's text with one more pair at its front."""
    honest = json.dumps({"__metadata__": metadata(), **entries(framed(contents()))})
    return "{" + pair + ", " + honest[1:]


def counted(count: str) -> str:
    """The groups' JSON with this text where the count of changed elements belongs."""
    return json.dumps([group(row(count="@"))]).replace('"@"', count)


BODY = b"".join(framed(contents()).values())
CONTAINERS = {
    "nothing": (b"", "delta object, expected at least 8 bytes, got 0"),
    "seven bytes": (b"1234567", "delta object, expected at least 8 bytes"),
    "header beyond the file": (container({}, length=3), "header length, expected at most 2 bytes, got 3"),
    "huge header": (container({}, length=2**64 - 1), "header length, expected at most 2 bytes"),
    "not JSON": (container("{nonsense"), "safetensors header, expected plain JSON"),
    "not UTF-8": (container("{}\udcff"), "safetensors header, expected plain JSON"),
    "a list": (container([]), "safetensors header, expected a JSON object, got list"),
    "bottomless": (container("[" * 100_000), "safetensors header, expected plain JSON"),
    "no metadata": (container({}), "__metadata__, expected a JSON object of Unicode strings, got None"),
    "metadata of numbers": (
        container({"__metadata__": {"version": 7}}),
        "__metadata__, expected a JSON object of Unicode",
    ),
    "key twice": (container(text_with('"0.gap": {}'), BODY), "JSON object, expected unique keys, got '0.gap' twice"),
    "metadata twice": (container(text_with('"__metadata__": {}'), BODY), "unique keys, got '__metadata__' twice"),
    "not a number": (container('{"__metadata__": NaN}'), "expected plain JSON"),
    "endless integer": (container('{"x": ' + LONG + "}"), "expected plain JSON"),
    "trailing bytes": (delta_object() + b"\0", r"delta object, expected \d+ bytes of streams, got \d+"),
    "cut short": (delta_object()[:-1], "expected to end by byte"),
    "overlap": (delta_object(step={"data_offsets": [1, 12]}), r"stream '0.step', expected shape \[n\] and"),
    "hole": (delta_object(gap={"data_offsets": [1, 13]}), r"stream '0.gap', expected shape \[n\] and"),
    "backwards": (delta_object(gap={"data_offsets": [12, 0]}), r"stream '0.gap', expected shape \[n\] and"),
    "negative": (delta_object(gap={"shape": [-1], "data_offsets": [0, -1]}), "stream '0.gap', expected shape"),
    "boolean": (delta_object(gap={"shape": [True], "data_offsets": [False, True]}), "stream '0.gap', expected"),
    "float": (delta_object(gap={"shape": [12.0], "data_offsets": [0, 12.0]}), "stream '0.gap', expected shape"),
    "two axes": (delta_object(gap={"shape": [1, 12]}), "stream '0.gap', expected shape"),
    "beyond the file": (delta_object(step_ext={"shape": [2**62], "data_offsets": [24, 24 + 2**62]}), "to end by byte"),
    "wrong stream type": (delta_object(gap={"dtype": "F64"}), "stream '0.gap', expected a U8 tensor entry"),
    "entry is a list": (container({"__metadata__": metadata(), "0.gap": []}), "expected a U8 tensor entry"),
    "entry with more": (delta_object(gap={"more": 1}), "expected a U8 tensor entry"),
}

HEADERS = {
    "another format": (metadata(format="pickle"), "delta header format, expected 'delta-sync', got 'pickle'"),
    "another version": (metadata(format_version="2"), "delta header format_version, expected '1', got '2'"),
    "unknown codec": (metadata(codec="zip"), "codec, expected one of .*, got 'zip'. Remedy: upgrade"),
    "surrogate run": (metadata(run="\ud800"), "__metadata__, expected a JSON object of Unicode strings"),
    "no run": (metadata(run=None), r"delta header, expected keys .*, got none of \['run'\]"),
    "negative version": (metadata(version="-1"), "delta header version, expected a plain decimal number, got '-1'"),
    "padded version": (metadata(version="07"), "delta header version, expected a plain decimal number, got '07'"),
    "endless version": (metadata(version=LONG), "delta header version, expected a plain decimal number"),
    "other digits": (metadata(version="\u0667"), "delta header version, expected a plain decimal number"),
    "base not before": (metadata(base_version="7"), "delta header base_version, expected less than version 7, got 7"),
    "groups not JSON": (metadata(groups="["), "delta header groups, expected plain JSON"),
    "groups an object": (metadata(groups="{}"), "delta header groups, expected a list, got dict"),
    "group a number": (metadata(groups="[1]"), "delta header group, expected encoding, dtype and tensors, got 1"),
    "group with more": (metadata(group(more=1)), "delta header group, expected encoding, dtype and tensors"),
    "unknown encoding": (metadata(group(encoding="xor")), "encoding, expected one of .*, got 'xor'"),
    "unhashable encoding": (metadata(group(encoding=[])), r"encoding, expected one of .*, got \[\]"),
    "unknown dtype": (metadata(group(dtype="F64")), "element type, expected one of .*, got 'F64'"),
    "unhashable dtype": (metadata(group(dtype={})), "element type, expected one of .*, got {}"),
    "tensors a string": (
        metadata(groups='[{"encoding":"ulp","dtype":"BF16","tensors":"w"}]'),
        "tensors, expected a list",
    ),
    "short row": (metadata(group(["w", [3]])), r"delta header tensor, expected \[name, shape, count\]"),
    "name a number": (metadata(group(row(name=1))), r"delta header tensor, expected \[name, shape, count\]"),
    "no name": (metadata(group(row(name=""))), "tensor name, expected 1 to 1024 bytes"),
    "long name": (metadata(group(row(name="n" * 1025))), "tensor name, expected 1 to 1024 bytes"),
    "NUL in name": (
        metadata(group(row(name="a\0b"))),
        "tensor name, expected 1 to 1024 bytes of UTF-8 without control",
    ),
    "lone surrogate": (metadata(group(row(name="\ud800"))), "tensor name, expected 1 to 1024 bytes of UTF-8"),
    "negative size": (metadata(group(row(shape=[-1, -100]))), r"shape of 'w', expected at most 16 sizes, got \[-1,"),
    "boolean size": (metadata(group(row(shape=[True, 100]))), "shape of 'w', expected at most 16 sizes"),
    "float size": (metadata(group(row(shape=[100.0]))), "shape of 'w', expected at most 16 sizes"),
    "rank 17": (metadata(group(row(shape=[1] * 17))), "shape of 'w', expected at most 16 sizes"),
    "huge product": (metadata(group(row(shape=[2**40, 2**40]))), "shape of 'w', expected at most 17592186044416 el"),
    "count beyond shape": (metadata(group(row(shape=[2], count=3))), "count of 'w', expected 0 to 2, got 3"),
    "count in nothing": (metadata(group(row(shape=[0, 2**62], count=3))), "count of 'w', expected 0 to 0, got 3"),
    "negative count": (metadata(group(row(count=-1))), "count of 'w', expected 0 to 100, got -1"),
    "NaN count": (metadata(groups=counted("NaN")), "delta header groups, expected plain JSON"),
    "infinite count": (metadata(groups=counted("1e999")), "count of 'w', expected 0 to 100, got inf"),
    "fractional count": (metadata(groups=counted("3.0")), r"count of 'w', expected 0 to 100, got 3\.0"),
    "count in words": (metadata(groups=counted('"3"')), "count of 'w', expected 0 to 100, got '3'"),
    "endless count": (metadata(groups=counted("9" * 5000)), "delta header groups, expected plain JSON"),
    "boolean count": (metadata(group(row(count=True))), "count of 'w', expected 0 to 100, got True"),
    "tensor twice": (metadata(group(row(), row())), "tensor 'w', expected each tensor once in an encoding"),
    "tensor of two shapes": (metadata(group(row()), group(row(shape=[101]), encoding="raw")), "one dtype and shape"),
    "tensor of two dtypes": (metadata(group(row()), group(row(), encoding="raw", dtype="F16")), "one dtype and shape"),
    "more streams wanted": (metadata(group(row()), group(row("v"))), "delta object streams, expected .*1.gap"),
    "other streams wanted": (metadata(group(encoding="raw")), "delta object streams, expected .*plane0"),
}

bomb = zstandard.ZstdCompressor().compress(bytes(64 * MiB))
no_size = zstandard.ZstdCompressor(write_content_size=False).compress(b"\0\1\2")
three = zstandard.ZstdCompressor().compress(b"\0\1\2")
skippable = b"\x50\x2a\x4d\x18\x04\0\0\0abcd"
claims_more = three[:5] + b"\xff" + three[6:]
four = zstandard.ZstdCompressor().compress(b"\0\1\2\3")
claims_three = four[:5] + b"\3" + four[6:]
STREAMS = {
    "bomb in gaps": (framed(contents(), gap=bomb), "stream gap, expected 3 bytes of content, got 67108864"),
    "bomb in steps": (framed(contents(), step=bomb), "stream step, expected 3 bytes of content, got 67108864"),
    "bomb in extension": (framed(contents(), step_ext=bomb), "stream step_ext, expected 0 to 6 bytes in units of 2"),
    "impossible size": (framed(contents(), step=b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8), "stream step, expected a"),
    "no size": (framed(contents(), step=no_size), "stream step, expected a declared content size"),
    "not zstd": (framed(contents(), step=b"PK\3\4"), "stream step, expected a zstd frame"),
    "empty": (framed(contents(), step=b""), "stream step, expected 3 bytes of content, got 0"),
    "cut frame": (framed(contents(), step=three[:-1]), "stream step, expected one intact zstd frame"),
    "claims more": (framed(contents(), step=claims_more), "stream step, expected 3 bytes of content"),
    "claims less": (framed(contents(), step=claims_three), "stream step, expected one intact zstd frame"),
    "two frames": (framed(contents(), step=three + three), "stream step, expected one intact zstd frame"),
    "trailing byte": (framed(contents(), step=three + b"\0"), "stream step, expected one intact zstd frame"),
    "skippable frame": (framed(contents(), step=skippable), "stream step, expected a declared content size"),
    "short": (framed(contents(step=b"\0\0")), "stream step, expected 3 bytes of content, got 2"),
    "odd extension": (framed(contents(step_ext=b"abc")), "stream step_ext, expected 0 to 6 bytes in units of 2"),
    "position beyond": (framed(contents(gap=b"\0\1\x61")), "group 0 gaps, expected positions below 100"),
    "gap without end": (framed(contents(gap=b"\0\1\xff")), "group 0 gaps, expected positions below 100, got .*few"),
    "sign left over": (framed(contents(sign=b"\x0a")), "group 0 steps, expected zeros after the last sign bit"),
    "signs missing": (framed(contents(sign=b"")), "stream sign, expected 1 bytes of content, got 0"),
    "needless escape": (framed(contents(step=b"\2\xff\2", step_ext=b"\xfe\0")), "steps, expected .* from 255 up"),
    "zero by overflow": (framed(contents(step=b"\2\xff\2", step_ext=b"\xff\xff")), "at most half the range, got 65535"),
    "extension missing": (framed(contents(step=b"\2\xff\2")), "steps, expected 1 step extensions, got 0"),
    "extension left": (framed(contents(step_ext=b"\xff\0")), "steps, expected 0 step extensions, got 1"),
}


@pytest.mark.parametrize("data,message", CONTAINERS.values(), ids=CONTAINERS)
def test_container(data, message):
    refused(data, message)


@pytest.mark.parametrize("meta,message", HEADERS.values(), ids=HEADERS)
def test_header(meta, message):
    refused(delta_object(meta), message)


@pytest.mark.parametrize("streams,message", STREAMS.values(), ids=STREAMS)
def test_streams(streams, message):
    refused(delta_object(streams=streams), message)


def refused(data, message):
    with pytest.raises(FormatError, match=message) as caught:
        decode_delta(data)
    assert len(str(caught.value)) < 700


def test_one_position_in_both_encodings():
    streams = framed(contents()) | framed({"1.gap": b"\5", "1.plane0": b"a", "1.plane1": b"b"})
    meta = metadata(group(row()), group(row(count=1), encoding="raw"))
    refused(delta_object(meta, streams), "tensor 'w', expected each position in one encoding, got one in both")


@pytest.mark.parametrize(
    "limit,message",
    [
        ({"object_bytes": 100}, "delta object, expected at most 100 bytes"),
        ({"header_bytes": 100}, "header length, expected at most 100 bytes"),
        ({"decoded_bytes": 29}, "delta object, expected at most 29 decoded bytes, got 30"),
        ({"tensors": 0}, "delta header groups, expected at most 0 tensors, got 1"),
        ({"name_bytes": 0}, "tensor name, expected 1 to 0 bytes"),
        ({"rank": 0}, "shape of 'w', expected at most 0 sizes"),
        ({"elements": 99}, "shape of 'w', expected at most 99 elements"),
    ],
)
def test_limits(limit, message):
    with pytest.raises(FormatError, match=message):
        decode_delta(delta_object(), dataclasses.replace(DEFAULT_LIMITS, **limit))


def honest_objects() -> list[bytes]:
    rng = np.random.default_rng(5)
    deltas = []
    for name, dtype in DTYPES.items():
        old = rng.integers(0, 200, 300).astype(dtype.carrier)
        new = np.where(rng.random(300) < 0.2, rng.integers(0, 2**8, 300), old).astype(dtype.carrier)
        deltas.append(diff(name, dtype, (300,), old, new))
        deltas.append(raw(name + ".raw", dtype, (300,), np.arange(0, 300, 7), new[::7].copy()))
    return [encode_delta(DeltaHeader("run", 7, 6, "gap8-ulp8-zstd"), part) for part in (deltas, deltas[:1], [])]


HONEST = honest_objects()


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_mutated_bytes_raise_only_format_errors(data):
    """Flip, cut, insert and repeat bytes anywhere: the file is refused, or means some delta; nothing else happens."""
    mutated = bytearray(data.draw(st.sampled_from(HONEST)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(mutated)))
        cut = data.draw(st.integers(0, 3))
        mutated[at : at + cut] = data.draw(st.binary(max_size=4))
    only_a_format_error(bytes(mutated))


@settings(deadline=None, max_examples=200)
@given(header=st.binary(max_size=200), body=st.binary(max_size=50))
def test_random_bytes_raise_only_format_errors(header, body):
    only_a_format_error(header + body)
    only_a_format_error(len(header).to_bytes(8, "little") + header + body)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=8,
)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), value=json_values)
def test_any_json_in_any_place_raises_only_format_errors(data, value):
    groups = [group(row()), group(row("v"), encoding="raw")]
    target = data.draw(st.sampled_from(["groups", "group", "row", "metadata", "entry"]))
    meta = metadata(*groups)
    if target == "groups":
        meta["groups"] = json.dumps(value)
    elif target == "group":
        meta = metadata({**groups[0], data.draw(st.sampled_from(sorted(groups[0]))): value})
    elif target == "row":
        meta = metadata(group([*row()[: data.draw(st.integers(0, 2))], value, *row()[1:]][:3]))
    elif target == "metadata":
        meta[data.draw(st.sampled_from(sorted(meta)))] = value if isinstance(value, str) else json.dumps(value)
    entry = {"gap": {"shape": value}} if target == "entry" else {}
    only_a_format_error(delta_object(meta, **entry))


def only_a_format_error(data: bytes) -> None:
    limits = dataclasses.replace(DEFAULT_LIMITS, decoded_bytes=8 * MiB)
    tracemalloc.start()
    try:
        decode_delta(data, limits)
    except FormatError as error:
        assert error.expected is not None and error.got is not None
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 4 * limits.decoded_bytes


@pytest.mark.parametrize("where", ["gap", "step", "step_ext", "sign"])
def test_a_bomb_allocates_nothing(where):
    """64 MiB in 2 KiB, for a tensor that could hold as much: sizes are compared before a frame is opened."""
    meta = metadata(group(row(shape=(2**33,), count=3)))
    data = delta_object(meta, framed(contents(), **{where: bomb}))
    tracemalloc.start()
    with pytest.raises(FormatError):
        decode_delta(data)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < MiB


def test_a_count_larger_than_the_caps_allocates_nothing():
    meta = metadata(group(row(shape=(2**40,), count=2**36)))
    refused(delta_object(meta), "delta object, expected at most 68719476736 decoded bytes, got")
    meta = metadata(group(row(shape=(2**40,), count=2**32)))
    refused(delta_object(meta), "stream gap, expected 4294967296 to .* bytes in units of 1 of content, got 3")
