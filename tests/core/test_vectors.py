"""Golden objects stay readable, by delta_sync and by the independent reader, which imports nothing of it."""

import importlib.util
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from delta_sync import DTYPES, apply, decode_delta, encode_delta, raw, tensor_key
from delta_sync.digest import digest
from delta_sync.tensor_delta import TensorDelta

VECTORS = Path(__file__).parent.parent / "vectors"
OBJECTS = sorted((VECTORS / "delta").glob("golden-*/*.safetensors"))
READER = VECTORS / "independent_reader.py"


def load_reader():
    spec = importlib.util.spec_from_file_location("independent_reader", READER)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


reader = load_reader()


def expected_of(path: Path) -> dict:
    return json.loads((path.parent / "expected.json").read_text())[path.stem]


def as_json(delta: TensorDelta) -> dict:
    found = {"name": delta.name, "dtype": delta.dtype.name, "shape": list(delta.shape), "encoding": delta.encoding}
    return found | {"positions": delta.positions.tolist(), "values": delta.values.tolist()}


def without_digest(change: dict) -> dict:
    return {key: value for key, value in change.items() if key != "digest_after_ones"}


def test_there_are_vectors():
    assert len(OBJECTS) >= 4


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_golden_objects(path):
    expected = expected_of(path)
    header, deltas = decode_delta(path.read_bytes())
    assert vars(header) == expected["header"]
    assert [as_json(delta) for delta in deltas] == [without_digest(change) for change in expected["deltas"]]
    for delta, change in zip(deltas, expected["deltas"], strict=True):
        bits = np.ones(math.prod(delta.shape), delta.dtype.carrier)
        apply(delta, bits)
        assert f"{digest(bits, tensor_key(delta.name)):016x}" == change["digest_after_ones"]


@pytest.mark.parametrize("path", OBJECTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_independent_reader_agrees(path):
    expected = expected_of(path)
    metadata, changes = reader.read_object(path.read_bytes())
    assert metadata["version"] == str(expected["header"]["version"])
    assert changes == [without_digest(change) for change in expected["deltas"]]
    for change, wanted in zip(changes, expected["deltas"], strict=True):
        bits = [1] * math.prod(change["shape"])
        reader.apply(change, bits)
        assert f"{reader.digest(change['name'], bits):016x}" == wanted["digest_after_ones"]


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_the_independent_reader_reads_what_is_written_today(dtype):
    rng = np.random.default_rng(1)
    top = 2 ** (8 * dtype.itemsize)
    at = np.flatnonzero(rng.random(3000) < 0.02).astype(np.int64)
    values = rng.integers(1, top, at.size, dtype=np.uint64).astype(dtype.carrier)
    deltas = [raw("r", dtype, (30, 100), at, values), TensorDelta("u", dtype, (3000,), "ulp", at, values)]
    header, _ = decode_delta(OBJECTS[0].read_bytes())
    assert reader.read_object(encode_delta(header, deltas))[1] == [as_json(delta) for delta in deltas]


def test_the_independent_reader_needs_only_numpy_and_zstandard():
    script = (
        "import sys, runpy; runpy.run_path(sys.argv[1]);"
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'delta_sync', 'numba', 'safetensors', 'torch'}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, READER], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
