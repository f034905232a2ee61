"""A run that an earlier release wrote must stay readable, with our code and with the standard library alone."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest

from delta_sync import AnchorRecord, Manifest, apply, decode_delta
from delta_sync.ack import Ack
from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.ledger import Ledger
from delta_sync.plan import Position
from delta_sync.records import Epoch, Head
from delta_sync.store import LocalStore

GOLDEN = Path(__file__).parent.parent / "vectors" / "ledger" / "golden-1"
EXPECTED = json.loads((GOLDEN / "expected.json").read_text())
KINDS = {"manifests": Manifest, "anchors": AnchorRecord, "replicas": Ack, "epochs": Epoch, "HEAD.json": Head}


MEASURED = GOLDEN.parent / "golden-3"


def documents(golden):
    run = golden / "run"
    for path in sorted(run.rglob("*.json")):
        if path.name not in ("config.json", "model.safetensors.index.json"):
            yield golden, path.relative_to(run).as_posix()


@pytest.fixture
def store(tmp_path):
    return LocalStore(shutil.copytree(GOLDEN / "run", tmp_path / "run"))


@pytest.mark.parametrize(("golden", "key"), [*documents(GOLDEN), *documents(MEASURED)])
def test_each_document_reads_and_writes_the_same_bytes(golden, key):
    data = (golden / "run" / key).read_bytes()
    kind = KINDS[key.partition("/")[0]]
    assert kind.from_bytes(data).to_bytes() == data


def test_the_numbers_of_trainer_and_replica_are_read():
    ledger = Ledger(LocalStore(MEASURED / "run"))
    newest = ledger.head()
    numbers = {"reward": -0.25, "loss": 1e-07, "rewards/letters_placed/mean": 0.5, "num_tokens": 4096}
    assert (newest.metrics, ledger.manifest(1).metrics) == (numbers, {})
    assert newest.traceparent == "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    assert ledger.acknowledgements()["replica-0"].performance["gap_seconds"] == 0.02


def check_bits(bits, sha256):
    expected = EXPECTED["versions"][sha256]["bits"]
    found = {name: [f"{int(v):0{2 * value.itemsize}x}" for v in value] for name, value in bits.items()}
    assert found == expected


def follow(ledger, plan, bits=None):
    if plan.start == "anchor":
        bits = {name: found.copy() for name, _, _, found in iter_anchor_tensors(ledger, plan.anchor)}
    for manifest in plan.deltas:
        for ref in manifest.objects:
            for delta in decode_delta(ledger.read_object(ref))[1]:
                apply(delta, bits[delta.name])
    return bits


def test_a_late_replica_gets_the_expected_bits(store):
    ledger = Ledger(store)
    plan = ledger.plan(None, None)
    assert plan.target.sha256 == EXPECTED["newest"]
    assert (plan.start, plan.anchor.version, plan.anchor.epoch) == ("anchor", 4, 2)
    assert [(m.version, m.epoch, len(m.objects)) for m in plan.deltas] == [(5, 2, 1), (6, 2, 0)]
    check_bits(follow(ledger, plan), EXPECTED["newest"])


def test_the_first_trainers_versions_give_the_expected_bits(store):
    ledger = Ledger(store)
    head = ledger.head()
    chain = {manifest.version: manifest for manifest in [head, *ledger.ancestors(head, 1)]}
    bits = {name: found.copy() for name, _, _, found in iter_anchor_tensors(ledger, ledger.anchor(chain[1]))}
    check_bits(bits, chain[1].sha256)
    for version in (2, 3):
        for ref in chain[version].objects:
            for delta in decode_delta(ledger.read_object(ref))[1]:
                apply(delta, bits[delta.name])
        check_bits(bits, chain[version].sha256)
    assert chain[2].extra == {"future": {"kept": [1, 2.5, None, "ü"]}}


def test_the_losing_version_is_no_part_of_the_run(store):
    ledger = Ledger(store)
    loser = ledger.manifest(4, next(sha for sha, v in EXPECTED["versions"].items() if "004-000001" in v["key"]))
    assert loser.epoch == 1
    plan = ledger.plan(Position(4, loser.sha256), loser.state_digest)
    assert plan.start == "anchor"
    check_bits(follow(ledger, plan), EXPECTED["newest"])


def test_acknowledgements(store):
    found = Ledger(store).acknowledgements()
    assert {name: ack.state for name, ack in found.items()} == {"replica-0": "live", "replica-1": "refused"}


# --- the same by the specification, with nothing of ours


def mix(key: int, position: int) -> int:
    z = (key + (position + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31 | 1


def test_every_number_follows_from_the_specification():
    run = GOLDEN / "run"
    manifests = {}
    for path in (run / "manifests").iterdir():
        data = path.read_bytes()
        manifests[hashlib.sha256(data).hexdigest()] = (path.name, json.loads(data))
    assert set(manifests) == set(EXPECTED["versions"])
    for sha256, (name, manifest) in manifests.items():
        assert name == f"{manifest['version']:012d}-{manifest['epoch']:06d}-{manifest['writer']}.json"
        parent = manifests[manifest["parent"]][1] if manifest["parent"] else {"version": 0}
        assert parent["version"] == manifest["version"] - 1
        for ref in manifest["objects"]:
            data = (run / ref["key"]).read_bytes()
            assert (len(data), hashlib.sha256(data).hexdigest()) == (ref["size"], ref["sha256"])
        lines, shapes = [], []
        for tensor, values in sorted(EXPECTED["versions"][sha256]["bits"].items(), key=lambda item: item[0].encode()):
            seed = hashlib.sha256(b"delta-sync/digest/1\0" + tensor.encode()).digest()
            key = int.from_bytes(seed[:8], "little")
            total = sum(mix(key, i) * int(value, 16) for i, value in enumerate(values)) % 2**64
            head = f"{tensor}\0{EXPECTED['dtypes'][tensor]}\0{','.join(map(str, EXPECTED['shapes'][tensor]))}"
            lines.append(f"{head}\0{total:016x}\n")
            shapes.append(f"{head}\n")
            if tensor in manifest["tensors"]:
                assert manifest["tensors"][tensor]["digest"] == f"{total:016x}"
        assert manifest["state_digest"] == hashlib.sha256("".join(lines).encode()).hexdigest()
        assert manifest["model_fingerprint"] == hashlib.sha256("".join(shapes).encode()).hexdigest()
