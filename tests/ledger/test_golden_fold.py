"""A run with a fold that an earlier release wrote: read by our code, and by the specification alone."""

from __future__ import annotations

import hashlib
import importlib.util
import json
from pathlib import Path
from types import ModuleType

import pytest
import test_golden_run
from test_golden_run import follow

from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.ledger import Ledger
from delta_sync.manifest import FoldRecord
from delta_sync.plan import Position
from delta_sync.store import LocalStore

VECTORS = Path(__file__).parent.parent / "vectors"
GOLDEN = VECTORS / "ledger" / "golden-2"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
KINDS = {**test_golden_run.KINDS, "folds": FoldRecord}
RECORDS = sorted(
    path.relative_to(GOLDEN / "run").as_posix()
    for path in (GOLDEN / "run").rglob("*.json")
    if path.name not in ("config.json", "model.safetensors.index.json")
)


def bits_at(version: int) -> dict[str, list[int]]:
    (found,) = (v["bits"] for v in EXPECTED["versions"].values() if v["key"].startswith(f"manifests/{version:012d}"))
    return {name: [int(value, 16) for value in values] for name, values in found.items()}


def independent_reader() -> ModuleType:
    spec = importlib.util.spec_from_file_location("independent_reader", VECTORS / "independent_reader.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("key", RECORDS)
def test_each_document_reads_and_writes_the_same_bytes(key: str) -> None:
    data = (GOLDEN / "run" / key).read_bytes()
    assert KINDS[key.partition("/")[0]].from_bytes(data).to_bytes() == data


@pytest.mark.parametrize("known", [False, True])
def test_a_late_replica_goes_over_the_fold_to_the_expected_bits(known: bool) -> None:
    ledger = Ledger(LocalStore(GOLDEN / "run"))
    first = ledger.manifest(1)
    plan = ledger.plan(Position(1, first.sha256) if known else None, None)
    assert [(step.base_version, step.version) for step in plan.deltas] == [(1, 4)]
    start = {name: bits.copy() for name, _, _, bits in iter_anchor_tensors(ledger, ledger.anchor(first))}
    found = follow(ledger, plan, start)
    assert {name: bits.tolist() for name, bits in found.items()} == bits_at(4)


def test_the_specification_alone_reads_it() -> None:
    reader = independent_reader()
    (path,) = (GOLDEN / "run" / "folds").rglob("*.json")
    assert path.relative_to(GOLDEN / "run").as_posix() == "folds/000000000004-000001/000000000001.json"
    record = json.loads(path.read_bytes())
    manifests = {
        json.loads(data)["version"]: (hashlib.sha256(data).hexdigest(), json.loads(data))
        for data in (each.read_bytes() for each in (GOLDEN / "run" / "manifests").iterdir())
    }
    assert (record["base_version"], record["base_manifest"]) == (1, manifests[1][0])
    assert (record["version"], record["manifest"]) == (4, manifests[4][0])
    assert record["state_digest"] == manifests[4][1]["state_digest"]
    (ref,) = record["objects"]
    data = (GOLDEN / "run" / ref["key"]).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"])
    metadata, changes = reader.read_object(data)
    assert (metadata["base_version"], metadata["version"], metadata["codec"]) == ("1", "4", record["codec"])
    bits = bits_at(1)
    for change in changes:
        reader.apply(change, bits[change["name"]])
    assert bits == bits_at(4)
    for name, state in record["tensors"].items():
        assert state["digest"] == f"{reader.digest(name, bits[name]):016x}"
