"""Golden context-coded objects stay readable, by delta_sync and by another reader; real changes survive."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest
from test_context import BIG

from delta_sync import DEFAULT_CODEC, DTYPES, DeltaHeader, apply
from delta_sync.codec import codec_names
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, decode_against, encode_against
from delta_sync.delta_file import encode_delta

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from traces import load

ROOT = Path(__file__).parents[2]
OBJECTS = sorted((ROOT / "tests/vectors/context").glob("golden-*/*.safetensors"))
TRACES = sorted((ROOT / "tests/traces").glob("lr*.npz"))
BF16 = DTYPES["BF16"]

SPEC = importlib.util.spec_from_file_location("context_reader", ROOT / "tests/vectors/independent_context_reader.py")
reader = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(reader)


def images(path):
    """Every tensor's bits before and after."""
    with np.load(path.with_suffix(".npz")) as file:
        old = {key[:-4]: file[key].reshape(-1) for key in file.files if key.endswith("/old")}
        return old, {name: file[f"{name}/new"].reshape(-1) for name in old}


def test_there_are_vectors_and_traces():
    assert len(OBJECTS) >= 3
    assert len(TRACES) >= 2


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_objects(path):
    old, new = images(path)
    header, deltas = decode_against(path.read_bytes(), lambda name, dtype, shape: old[name])
    assert (header.codec, header.version, header.base_version) == (CONTEXT_CODEC, 2, 1)
    assert {delta.name for delta in deltas} == set(old)
    for delta in deltas:
        bits = old[delta.name].copy()
        apply(delta, bits)
        np.testing.assert_array_equal(bits, new[delta.name])


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_independent_reader_agrees(path):
    old, _ = images(path)
    found = reader.read_object(path.read_bytes(), {name: bits.tolist() for name, bits in old.items()})[1]
    for delta in decode_against(path.read_bytes(), lambda name, dtype, shape: old[name])[1]:
        assert found[delta.name] == dict(zip(delta.positions.tolist(), delta.values.tolist(), strict=True))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_real_changes_survive_and_cost_less_than_in_the_gap_codec(path):
    step, made = load(path)
    assert made["model"] == "SmolLM2-135M"
    header = DeltaHeader("run", 2, 1, DEFAULT_CODEC)
    _, data, deltas = encode_against(header, changes_of(step))
    assert_restores(data, step)
    assert sum(delta.changed for delta in deltas) > 50
    assert len(data) <= len(encode_delta(header, deltas))


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_every_codec_restores_real_changes(path):
    """Also those that would not be chosen: in a few rows the header decides which is smaller, a larger tensor helps."""
    step, _ = load(path)
    deltas = encode_against(DeltaHeader("run", 2, 1, DEFAULT_CODEC), changes_of(step))[2]
    for codec in codec_names():
        assert_restores(encode_delta(DeltaHeader("run", 2, 1, codec), deltas), step)
    for grid in ((1, 1), (2, 2)):
        header, data, _ = encode_against(DeltaHeader("run", 2, 1, DEFAULT_CODEC), [*changes_of(step), BIG], grid)
        assert header.codec == CONTEXT_CODEC
        assert_restores(data, [*step, BIG])


def changes_of(step):
    return [Change(c.name, BF16, c.shape, c.old, c.new) for c in step]


def assert_restores(data, step):
    """Every tensor's new bits come out of its old ones."""
    old = {c.name: c.old for c in step}
    for delta, change in zip(decode_against(data, lambda name, *_: old[name])[1], step, strict=True):
        bits = change.old.copy()
        apply(delta, bits)
        np.testing.assert_array_equal(bits, change.new)


def test_the_speed_benchmark_compares_all_layouts_on_a_trace(tmp_path):
    """The command's own path on a trace beside the tests: sizes and bounds agree with the bytes."""
    import codec_speed
    from traces import cut, save

    step, made = load(TRACES[-1])
    result = codec_speed.measure(step, 1)
    sizes = {row["layout"]: row["bytes_per_changed"] for row in result["layouts"]}
    assert sizes["TRL: int32 index + bf16"] == 6
    assert 4 <= sizes["TRL: u16 gap + bf16"] < 4.1
    assert sizes["raw safetensors"] == pytest.approx(200 / result["changed_percent"], rel=1e-3)
    assert result["entropy"]["given_old_exponent"] < result["entropy"]["uniform"]
    assert result["over_entropy"] >= 1
    save(tmp_path / "start.npz", cut(step, 8), made)
    save(tmp_path / "again.npz", cut(step, 8), made, tmp_path / "start.npz")
    again, made_again = load(tmp_path / "again.npz")
    assert made_again == made | {"start": "start.npz"}
    assert (tmp_path / "again.npz").stat().st_size < (tmp_path / "start.npz").stat().st_size / 4
    for short, long in zip(again, step, strict=True):
        np.testing.assert_array_equal(short.new, long.new[: short.new.size])
