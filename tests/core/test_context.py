"""The context codec restores every bit, is never larger than the gap codec, and refuses whatever lies."""

import dataclasses
import json
import tracemalloc

import numpy as np
import pytest
import zstandard
from forge import container, entries, frame
from hypothesis import given, settings
from hypothesis import strategies as st
from test_round_trip import SPECIAL

from delta_sync import (
    DEFAULT_CODEC,
    DTYPES,
    DeltaHeader,
    FormatError,
    MappingError,
    apply,
    context_encode,
    decode_delta,
    encode_delta,
)
from delta_sync.container import read_container
from delta_sync.context_codec import CONTEXT_CODEC, STREAMS
from delta_sync.context_file import Change, PartOf, decode_against, encode_against, encode_deltas_against
from delta_sync.context_model import choose_classes, tiles
from delta_sync.context_table import Table
from delta_sync.limits import DEFAULT_LIMITS

HEADER = DeltaHeader("run", 7, 6, DEFAULT_CODEC)
MiB = 1024**2


def weights(shape, dtype="BF16", seed=0, moved_by=3e-6):
    """Bits like a trained tensor's before and after a step: small values change often and far, large ones seldom."""
    kind, rng = DTYPES[dtype], np.random.default_rng(seed)
    values = (rng.standard_normal(shape) * 0.02).astype(np.float32)
    moved = (values + rng.standard_normal(shape).astype(np.float32) * moved_by).astype(np.float32)
    shift = 32 - 8 * kind.itemsize
    old, new = (((v.view(np.uint32) + (1 << shift >> 1)) >> shift).astype(kind.carrier) for v in (values, moved))
    return Change("w", kind, tuple(np.shape(old)), old, new)


def round_trip(changes, grid=(1, 1)):
    _, data, deltas = encode_against(HEADER, changes, grid)
    olds = {c.name: c.old for c in changes}
    header, got = decode_against(data, lambda name, dtype, shape: olds[name])
    assert [(d.name, d.shape) for d in got] == [(d.name, d.shape) for d in deltas]
    for delta, mine in zip(got, deltas, strict=True):
        np.testing.assert_array_equal(delta.positions, mine.positions)
        np.testing.assert_array_equal(delta.values, mine.values)
    for change in changes:
        (delta,) = (d for d in got if d.name == change.name)
        bits = change.old.copy()
        apply(delta, bits)
        assert bits.tobytes() == change.new.tobytes()
    assert len(data) <= len(encode_delta(HEADER, deltas))
    return header, data


@st.composite
def bits_pairs(draw, dtype):
    """Any two images of one tensor: special values and noise, mostly equal, or wholly other, up to several blocks."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    size = draw(st.sampled_from([0, 1, 2, 63, 64, 127, 128, 129, 500, 1500]))
    pool = np.array(draw(st.lists(st.sampled_from(SPECIAL[dtype.name]), min_size=1, max_size=5)), dtype.carrier)
    noise = rng.integers(0, 2 ** (8 * dtype.itemsize), (2, size), dtype=np.uint64).astype(dtype.carrier)
    old = np.where(rng.random(size) < draw(st.sampled_from([0, 0.5, 1])), noise[0], rng.choice(pool, size))
    near = old + rng.choice(np.array([1, 2, 255, 256], np.int64), size).astype(dtype.carrier)
    new = np.where(rng.random(size) < draw(st.sampled_from([0, 0.5, 1])), noise[1], near).astype(dtype.carrier)
    keep = rng.random(size) >= draw(st.sampled_from([0, 0.01, 0.5, 1]))
    return old, np.where(keep, old, new).astype(dtype.carrier)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_change_survives(dtype, data):
    """In context streams: padded by tensors of enough change that the gap codec is not the smaller one."""
    old, new = data.draw(bits_pairs(dtype))
    columns = data.draw(st.sampled_from([1, 2, 5]))
    size = old.size - old.size % columns
    shape = (size // columns, columns) if columns > 1 else (size,)
    changes = [Change("w", dtype, shape, old[:size], new[:size])]
    if data.draw(st.booleans()) and dtype.name == "BF16":
        changes.append(BIG)
    round_trip(changes, data.draw(st.sampled_from([(1, 1), (3, 1), (1, 2), (4, 3)])))


BIG = Change("big", DTYPES["BF16"], (300, 500), weights((300, 500)).old, weights((300, 500)).new)


@pytest.mark.parametrize("dtype", ["BF16", "F32"])
@pytest.mark.parametrize("grid", [(1, 1), (8, 1), (1, 4), (4, 4)])
def test_trained_weights_take_context_streams_in_any_tiles(dtype, grid):
    moved_by = 3e-6 if dtype == "BF16" else 3e-11  # float32 steps of 3e-6 are long: planes are smaller
    weight = weights((256, 700), dtype, moved_by=moved_by)
    header, data = round_trip([weight, Change("bias", DTYPES[dtype], (9,), *edges(dtype))], grid)
    assert header.codec == CONTEXT_CODEC
    assert grid == table_of(data).grid


def edges(dtype):
    old = np.resize(np.array(SPECIAL[dtype], DTYPES[dtype].carrier), 9)
    return old, old[::-1].copy()


def table_of(data):
    return Table.from_bytes(zstandard.decompress(read_container(data, DEFAULT_LIMITS)[1]["0.table"]), "table")


@pytest.mark.parametrize("grid", [(1, 1), (3, 2)])
def test_known_deltas_code_to_the_same_bytes_as_old_and_new_bits(grid):
    changes = [weights((256, 700), seed=1), BIG]
    _, data, deltas = encode_against(HEADER, changes, grid)
    olds = {c.name: c.old for c in changes}
    header, same = encode_deltas_against(HEADER, deltas, lambda name, dtype, shape: olds[name], grid)
    assert (header.codec, same) == (CONTEXT_CODEC, data)


@pytest.mark.parametrize("grid", [(1, 1), (4, 2)])
def test_threads_change_nothing(grid, monkeypatch):
    changes = [weights((256, 700), seed=1), BIG, Change("bias", DTYPES["BF16"], (9,), *edges("BF16"))]
    coded = []
    for threads in ("1", "3"):
        monkeypatch.setenv("DELTA_SYNC_THREADS", threads)
        coded.append(round_trip(changes, grid)[1])
    assert coded[0] == coded[1]
    monkeypatch.setenv("DELTA_SYNC_THREADS", "0")
    with pytest.raises(FormatError, match="a number of threads from 1"):
        round_trip(changes, grid)


class Matrix:
    """Held as a rank of tensor parallelism holds a tensor of ``columns``: a run of rows, or of columns."""

    def __init__(self, change, rows=slice(None), columns=slice(None)):
        self.mask = np.zeros(change.shape, np.bool_)
        self.mask[rows, columns] = True
        bits = np.where(self.mask, change.old, np.random.default_rng(9).integers(0, 2**16, change.shape))
        self.part = PartOf(bits.astype(np.uint16).reshape(-1), int(self.mask.sum()), self._holds)

    def _holds(self, tile):
        flat = self.mask.reshape(-1)
        return all(flat[tile.start + r * tile.stride :][: tile.length].all() for r in range(tile.rows))


@pytest.mark.parametrize(
    "held", [{"rows": slice(0, 128)}, {"rows": slice(128, 256)}, {"columns": slice(350, 700)}, {"rows": slice(0, 0)}]
)
def test_a_part_decodes_from_its_own_bits_alone(held):
    """Rows or columns of two ranks, with steps of all sizes; every other bit is noise to the reader."""
    far = weights((256, 700), seed=2)
    far.new.reshape(-1)[::977] ^= 0x3FFF  # large steps, of both signs
    changes = [far, Change("other", far.dtype, (256, 700), weights((256, 700)).old, weights((256, 700)).new)]
    _, data, deltas = encode_against(HEADER, changes, (2, 2))
    parts = {c.name: Matrix(c, **held) for c in changes}
    _, got = decode_against(data, lambda name, dtype, shape: parts[name].part)
    for whole, mine in zip(deltas, got, strict=True):
        inside = parts[whole.name].mask.reshape(-1)[whole.positions]
        assert mine.positions.tolist() == whole.positions[inside].tolist()
        assert mine.values.tolist() == whole.values[inside].tolist()


def test_tiles_that_do_not_make_up_a_part_are_refused():
    change = weights((256, 700))
    with pytest.raises(MappingError, match=r"2 x 2 parts, of which those within cover 0.*tiles"):
        decode_against(encode_against(HEADER, [change], (2, 2))[1], lambda *_: Matrix(change, slice(0, 100)).part)


def test_more_classes_than_a_word_has_bits(monkeypatch):
    """Another writer may use up to 255."""
    monkeypatch.setattr(context_encode, "_POSITION_CLASSES", 200)
    monkeypatch.setattr(context_encode, "_CLASS_BITS", -1)
    old = np.random.default_rng(4).integers(0, 2**16, 300_000).astype(np.uint16)
    new = np.where(old >> 7 & 3, old, old + 1).astype(np.uint16)
    header, data = round_trip([Change("w", DTYPES["BF16"], old.shape, old, new)])
    assert header.codec == CONTEXT_CODEC
    assert len(table_of(data).firsts) > 128


def test_it_is_smaller_than_the_gap_codec_by_a_quarter_on_trained_weights():
    _, data = round_trip([weights((2000, 1000))])
    (_, deltas) = decode_against(data, lambda *_: weights((2000, 1000)).old)
    assert len(data) < 0.75 * len(encode_delta(HEADER, deltas))


def test_few_changes_fall_back_to_the_gap_codec():
    old = np.arange(1000, dtype=np.uint16)
    header, data = round_trip([Change("w", DTYPES["BF16"], (1000,), old, old + (old == 5))])
    assert header.codec == DEFAULT_CODEC
    assert decode_delta(data)[1][0].positions.tolist() == [5]


def test_a_reader_without_the_base_refuses_by_name():
    _, data = round_trip([weights((256, 700))])
    with pytest.raises(FormatError, match=CONTEXT_CODEC):
        decode_delta(data)


def test_another_base_is_refused_or_gives_other_positions():
    change = weights((256, 700))
    _, data, (delta,) = encode_against(HEADER, [change])
    other = np.zeros_like(change.old)
    with pytest.raises(FormatError, match="positions within a tile"):
        decode_against(data, lambda *_: other)
    with pytest.raises(FormatError, match=r"bits of w, expected uint16 of shape \[256, 700\]"):
        decode_against(data, lambda *_: other[:5])
    near = np.roll(change.old, 1)
    try:
        got = decode_against(data, lambda *_: near)[1][0].positions
    except FormatError:
        return
    assert not np.array_equal(got, delta.positions)


def test_tiles_cover_each_element_once():
    for shape, grid in [((), (1, 1)), ((7,), (3, 2)), ((5, 7), (2, 3)), ((2, 3, 5), (4, 9)), ((0, 4), (2, 2))]:
        seen = np.zeros(shape, np.uint8).reshape(-1)
        for tile in tiles(shape, grid):
            for row in range(tile.rows):
                seen[tile.start + row * tile.stride :][: tile.length] += 1
        assert (seen == 1).all(), (shape, grid)


def test_classes_are_merged_where_their_statistics_agree():
    counts = np.zeros((256, 2), np.int64)
    counts[100:110] = [10, 990]
    counts[110:120] = [99_000, 1000]
    assert choose_classes(counts, 7, 100) == [0, 110]
    assert choose_classes(counts, 1, 0) == [0]
    assert choose_classes(np.zeros((256, 2), np.int64), 7, 100) == [0]


@pytest.fixture(scope="module")
def honest():
    change = weights((128, 160), seed=3)
    return encode_against(HEADER, [change])[1], change.old


def forged(data, **changed):
    """The same object with some streams' bytes replaced."""
    metadata, streams = read_container(data, DEFAULT_LIMITS)
    frames = {name: bytes(changed.get(name[2:], frame)) for name, frame in streams.items()}
    return container({"__metadata__": metadata, **entries(frames)}, b"".join(frames.values()))


def refused(data, old, match):
    with pytest.raises(FormatError, match=match):
        decode_against(data, lambda *_: old)


def with_table(data, edit):
    content = bytearray(zstandard.decompress(read_container(data, DEFAULT_LIMITS)[1]["0.table"]))
    edit(content)
    return forged(data, table=zstandard.compress(bytes(content)))


TABLES = {
    "no classes": (lambda t: t.__setitem__(0, 0), "table, expected"),
    "more classes": (lambda t: t.__setitem__(0, 255), "table, expected"),
    "contexts from 1": (lambda t: t.__setitem__(6, 1), "contexts that rise from 0"),
    "no parts": (lambda t: t.__setitem__(slice(2, 4), b"\0\0"), "1 to 256 parts"),
    "too many parts": (lambda t: t.__setitem__(slice(2, 4), b"\1\1"), "1 to 256 parts"),
    "other parts": (lambda t: t.__setitem__(2, 2), "stream count, expected"),
    "trailing": (lambda t: t.append(0), r"table, expected \d+ bytes"),
    "empty": (lambda t: t.clear(), "stream table|at least 6 bytes"),
    "frame sizes": (lambda t: t.__setitem__(-8, t[-8] ^ 1), r"stream step, expected \d+ bytes"),
}


@pytest.mark.parametrize("case", TABLES)
def test_tables_that_lie(honest, case):
    edit, match = TABLES[case]
    refused(with_table(honest[0], edit), honest[1], match)


bomb = zstandard.ZstdCompressor().compress(bytes(64 * MiB))
STREAM_LIES = {
    "table": (bomb, "stream table, expected at most"),
    "count": (bomb, "stream count, expected"),
    "step_ext": (bomb, "stream step_ext, expected"),
    "sign": (bomb, "stream sign, expected"),
    "gap": (bomb, "stream gap, expected"),
    "low": (b"x", "stream low, expected"),
    "step": (b"", "stream step, expected"),
}


@pytest.mark.parametrize("name", STREAM_LIES)
def test_streams_that_lie_allocate_nothing(honest, name):
    frame, match = STREAM_LIES[name]
    data = forged(honest[0], **{name: frame})
    tracemalloc.start()
    refused(data, honest[1], match)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 8 * MiB


def test_counts_that_lie(honest):
    planes = np.frombuffer(zstandard.decompress(read_container(honest[0], DEFAULT_LIMITS)[1]["0.count"]), np.uint8)
    for at, value in ((0, planes[0] ^ 1), (planes.size - 1, 255)):
        lie = planes.copy()
        lie[at] = value
        refused(forged(honest[0], count=zstandard.compress(lie.tobytes())), honest[1], "stream count, expected")


def test_raw_groups_are_refused(honest):
    data, old = honest
    metadata, streams = read_container(data, DEFAULT_LIMITS)
    groups = json.loads(metadata["groups"])
    groups[0]["encoding"] = "raw"
    meta = metadata | {"groups": json.dumps(groups)}
    refused(container({"__metadata__": meta, **entries(streams)}, b"".join(streams.values())), old, "encoding 'ulp'")
    assert list(streams) == [f"0.{name}" for name in STREAMS]


def with_frame(data, name, k, edit):
    """The same object with the content of one frame of ``gap``, ``low`` or ``step`` edited and the table to match."""
    streams = {key[2:]: part for key, part in read_container(data, DEFAULT_LIMITS)[1].items()}
    table = table_of(data)
    frames = [bytes(part) for part in table.frames(name, streams)]
    frames[k] = frame(bytes(edit(bytearray(zstandard.decompress(frames[k])))))
    head = dataclasses.replace(table, **{name: tuple(map(len, frames))})
    return forged(data, table=zstandard.compress(head.to_bytes()), **{name: b"".join(frames)})


FRAME_LIES = {
    "a gap beyond the tile": ("gap", -1, lambda c: b"\xff" * 50 + b"\0" + c[1:], "stream gap|gaps|positions"),
    "one gap less": ("gap", -1, lambda c: c[:-1], "stream gap|gaps"),
    "gaps that never end": ("gap", -1, lambda c: b"\xff" * len(c), "stream gap|gaps|group 0"),
    "a step more": ("step", 0, lambda c: c + b"\0", "stream step, expected"),
    "an extension more": ("step", -1, lambda c: b"\xff" + c[1:], "step extensions"),
    "no ones": ("gap", 0, lambda c: bytes(len(c)), "the last one in the last byte"),
}


@pytest.mark.parametrize("case", FRAME_LIES)
def test_frames_that_lie(honest, case):
    name, k, edit, match = FRAME_LIES[case]
    assert table_of(honest[0]).splits[0] == 255
    refused(with_frame(honest[0], name, k, edit), honest[1], match)


@settings(deadline=None, max_examples=400)
@given(data=st.data())
def test_mutations_are_refused_or_decode_to_something_valid(honest, data):
    """Bit flips, in the file and in the content of its frames: FormatError or positions that rise within the tensor."""
    file, old = honest
    _, streams = read_container(file, DEFAULT_LIMITS)
    if data.draw(st.booleans()):
        lie = bytearray(file)
        for _ in range(data.draw(st.integers(1, 3))):
            lie[data.draw(st.integers(0, len(lie) - 1))] ^= data.draw(st.integers(1, 255))
    else:
        name = data.draw(st.sampled_from(["table", "count", "sign", "step_ext", "gap", "step"]))

        def flip(content):
            content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
            return bytes(content)

        if name in ("gap", "step"):
            table = table_of(file)
            full = [k for k, length in enumerate(getattr(table, name)) if length]
            lie = with_frame(file, name, data.draw(st.sampled_from(full)), flip)
        else:
            content = bytearray(zstandard.decompress(streams[f"0.{name}"])) if streams[f"0.{name}"] else bytearray(2)
            lie = forged(file, **{name: zstandard.compress(flip(content))})
    try:
        deltas = decode_against(bytes(lie), lambda name, dtype, shape: old)[1]
    except FormatError:
        return
    for delta in deltas:
        assert (np.diff(delta.positions, prepend=-1) > 0).all()
        assert delta.positions.size == 0 or delta.positions[-1] < old.size
        assert (delta.values != 0).all()
