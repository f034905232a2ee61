"""A run of LoRA adapters stays readable, with our code and with the standard library; what is malformed is refused."""

from __future__ import annotations

import hashlib
import json
import shutil
import struct
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from delta_sync import Manifest, dtype
from delta_sync.adapter import AdapterConfig, decode_adapter, encode_adapter, read_adapter
from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.cli.weights import rebuild
from delta_sync.errors import FormatError, IntegrityError
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.retention import find_trim
from delta_sync.store import LocalStore
from delta_sync.way_back import plan_back

GOLDEN = Path(__file__).parent.parent / "vectors" / "ledger" / "golden-4"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
CONFIG = AdapterConfig(1, 2, ("layer",), base_model="golden/base", task_type="CAUSAL_LM")


@pytest.fixture
def ledger(tmp_path: Path) -> Ledger:
    return Ledger(LocalStore(shutil.copytree(GOLDEN / "run", tmp_path / "run")))


def chain(ledger: Ledger) -> dict[int, Manifest]:
    head = ledger.head()
    assert head is not None and head.sha256 == EXPECTED["newest"]
    return {manifest.version: manifest for manifest in [head, *ledger.ancestors(head, 1)]}


def test_every_version_reads_as_it_was_written(ledger: Ledger) -> None:
    versions = chain(ledger)
    assert [(m.version, m.epoch, m.kind) for m in versions.values()] == [
        (4, 2, "adapter"),
        (3, 1, "adapter"),
        (2, 1, "adapter"),
        (1, 1, "origin"),
    ]
    for manifest in versions.values():
        data = (GOLDEN / "run" / manifest.key).read_bytes()
        assert Manifest.from_bytes(data).to_bytes() == data
        if manifest.kind == "adapter":
            adapter = read_adapter(ledger, manifest)
            found = {name: [f"{int(bit):04x}" for bit in tensor[3]] for name, tensor in adapter.tensors.items()}
            assert (adapter.config, found) == (CONFIG, EXPECTED["versions"][manifest.sha256]["adapter"])
            assert adapter.config.scaling == 2.0


def test_by_the_specification_with_nothing_of_ours() -> None:
    run = GOLDEN / "run"
    for path in sorted((run / "manifests").glob("*.json")):
        manifest = json.loads(path.read_bytes())
        if manifest["kind"] != "adapter":
            continue
        [ref] = manifest["objects"]
        data = (run / ref["key"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"])
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        metadata = header.pop("__metadata__")
        assert (metadata["format"], metadata["version"]) == ("delta-sync-adapter", str(manifest["version"]))
        config = json.loads(metadata["adapter_config"])
        assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 1, 2)
        expected = EXPECTED["versions"][hashlib.sha256(path.read_bytes()).hexdigest()]["adapter"]
        for name, entry in header.items():
            start, end = (8 + length + offset for offset in entry["data_offsets"])
            bits = struct.unpack(f"<{(end - start) // 2}H", data[start:end])
            assert [f"{bit:04x}" for bit in bits] == expected[name]
            state = manifest["tensors"][name]
            assert (state["dtype"], state["shape"]) == (entry["dtype"], entry["shape"])


def test_a_reader_needs_the_base_and_the_last_adapter_alone(ledger: Ledger) -> None:
    versions = chain(ledger)
    late = ledger.plan(None, None)
    assert late is not None and (late.start, late.target.version, late.deltas) == ("anchor", 4, ())
    at = Position(2, versions[2].sha256)
    step = ledger.plan(at, None)
    assert step is not None and (step.start, step.deltas) == ("position", ())
    loaded = ledger.plan(None, versions[1].state_digest)
    assert loaded is not None and (loaded.start, loaded.target.version) == ("live", 4)
    back = plan_back(ledger, versions[2], Position(4, versions[4].sha256))
    assert (back.target.version, back.deltas, back.tensors) == (2, (), {})
    _, weights = rebuild(ledger, versions[4])
    anchor = ledger.anchor(versions[1])
    assert anchor is not None
    assert {n: b.tobytes() for n, b in weights.bits.items()} == {
        name: bits.tobytes() for name, _, _, bits in iter_anchor_tensors(ledger, anchor)
    }


def test_adapters_of_no_version_are_orphans(ledger: Ledger) -> None:
    [ref] = chain(ledger)[4].objects
    stray = ref.key.replace("000000000004-000002-", "000000000004-000002-0")
    ledger.store.put(stray, b"x")
    trim = find_trim(ledger, keep=1, grace=0.001, now=time.time() + 1)  # all of it was written within that time
    assert trim.keys == (stray,)


def test_another_object_or_other_tensors_are_refused(ledger: Ledger) -> None:
    versions = chain(ledger)
    wrong = replace(versions[3], objects=versions[4].objects)
    with pytest.raises(IntegrityError, match="run and version"):
        read_adapter(ledger, wrong)
    wrong = replace(versions[3], tensors=versions[4].tensors)
    with pytest.raises(IntegrityError, match="lora_A"):
        read_adapter(ledger, wrong)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"objects": ()}, "one, an adapter's"),
        ({"tensors": {}}, "one, an adapter's"),
        ({"codec": "gap8-ulp8-zstd"}, "one, an adapter's"),
        ({"base_version": None}, "only an origin is version 1"),
    ],
)
def test_a_manifest_that_is_no_adapters_is_refused(ledger: Ledger, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        replace(chain(ledger)[3], **changes).to_bytes()


def tensor(name: str, shape: tuple[int, ...]) -> Any:
    return f"base_model.model.{name}", dtype("BF16"), shape, np.zeros(int(np.prod(shape)), np.uint16)


A, B = tensor("l.lora_A.weight", (1, 4)), tensor("l.lora_B.weight", (2, 1))


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        ([], "none, or several"),
        ([A], r"B \[\]"),
        ([A, tensor("l.lora_B.weight", (2, 3))], r"B \[2, 3\]"),
        ([tensor("l.lora_A.weight", (4,)), B], r"A \[4\]"),
        ([A, B, tensor("l.weight", (2, 2))], "another name"),
        ([A, (B[0], dtype("F32"), B[2], np.zeros(2, np.uint32))], "one element type"),
    ],
)
def test_what_is_no_pairs_of_the_rank_is_refused(tensors: list[Any], said: str) -> None:
    with pytest.raises(FormatError, match=said):
        encode_adapter("run", 2, CONFIG, tensors)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"format":"delta-sync-adapter"', b'"format":"delta-sync-other.."'),
        (b'\\"peft_type\\":\\"LORA\\"', b'\\"peft_type\\":\\"IA3.\\"'),
        (b'\\"bias\\":\\"none\\"', b'\\"bias\\":\\"all.\\"'),
        (b'\\"r\\":1', b'\\"r\\":0'),
        (b'\\"lora_alpha\\":2', b'\\"lora_alpha\\":0'),
        (b'\\"target_modules\\":[\\"layer\\"]', b'\\"target_modules\\":[\\"\\"]     '),
        (b'\\"use_rslora\\":false', b'\\"use_rslora\\":12345'),
    ],
)
def test_a_config_of_another_kind_is_refused(old: bytes, new: bytes) -> None:
    data = encode_adapter("run", 2, CONFIG, [A, B])
    assert old in data and len(old) == len(new)
    with pytest.raises(FormatError):
        decode_adapter(data.replace(old, new), "adapter")
    assert decode_adapter(data, "adapter").config == CONFIG
