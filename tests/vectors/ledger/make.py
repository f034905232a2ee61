"""Writes a golden run: ``python make.py FOLDER`` (refuses an existing one: golden files are added, never replaced).

``golden-1``: two trainers: epoch 1 publishes versions 1 to 3, and a late version 4 that loses; epoch 2 resumes with
version 4. ``golden-2``: one trainer's versions 1 to 4, an anchor of the first, and a fold from there to version 4.
``golden-3``: versions 1 and 2 with the training log's numbers and a trace context, and an acknowledgement with its own.
``golden-4``: an origin with an anchor, then versions 2 and 3, which are LoRA adapters; epoch 2 goes on with version 4.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from delta_sync import (
    DEFAULT_CODEC,
    AnchorRecord,
    DeltaHeader,
    Manifest,
    ObjectRef,
    TensorState,
    diff,
    dtype,
    encode_delta,
    model_fingerprint,
    state_digest,
    tensor_key,
)
from delta_sync.ack import Ack
from delta_sync.adapter import AdapterConfig, encode_adapter
from delta_sync.anchor_files import write_anchor_files
from delta_sync.digest import digest
from delta_sync.fold_writer import attach_fold
from delta_sync.records import Epoch, Head
from delta_sync.store import LocalStore
from delta_sync.store.keys import HEAD, adapter_key, anchor_folder, anchor_key, delta_key, fold_key

RUN = "golden-run"
DTYPES = {"größe.weight": "F32", "layer.weight": "BF16", "scale": "F8_E4M3"}
SHAPES = {"größe.weight": (3,), "layer.weight": (2, 4), "scale": ()}
FIRST = {
    "größe.weight": [0x00000000, 0x80000000, 0x7FC00001],  # 0, -0, a NaN
    "layer.weight": [0x3F80, 0xBF80, 0x0001, 0x8001, 0x7F80, 0xFF80, 0x0000, 0x8000],
    "scale": [0x38],
}
Bits = dict[str, np.ndarray]


def bits_of(values: dict[str, list[int]]) -> Bits:
    return {name: np.array(value, dtype(DTYPES[name]).carrier) for name, value in values.items()}


def states(bits: Bits) -> dict[str, TensorState]:
    return {n: TensorState(DTYPES[n], SHAPES[n], digest(bits[n], tensor_key(n))) for n in sorted(bits)}


class Golden:
    def __init__(self, folder: Path) -> None:
        self.store = LocalStore(folder)
        self.expected: dict[str, object] = {}

    def claim(self, epoch: int, writer: str) -> None:
        self.epoch, self.writer = epoch, writer
        claim = Epoch(RUN, epoch, writer, 1000.0 * epoch)
        self.store.create(claim.key, claim.to_bytes())

    def manifest(
        self, parent: Manifest | None, old: Bits | None, new: Bits, extra: dict[str, object], **about: object
    ) -> Manifest:
        version = parent.version + 1 if parent else 1
        names = [] if old is None else [name for name in sorted(new) if not np.array_equal(old[name], new[name])]
        deltas = [diff(name, dtype(DTYPES[name]), SHAPES[name], old[name], new[name]) for name in names]
        objects = []
        if deltas:
            data = encode_delta(DeltaHeader(RUN, version, version - 1, DEFAULT_CODEC), deltas)
            sha256 = hashlib.sha256(data).hexdigest()
            objects = [ObjectRef(delta_key(version, self.epoch, sha256), len(data), sha256)]
            self.store.put(objects[0].key, data)
        every = states(new)
        manifest = Manifest(
            run=RUN, epoch=self.epoch, writer=self.writer, version=version, kind="origin" if old is None else "delta",
            base_version=None if old is None else version - 1, parent=parent.sha256 if parent else None,
            steps=(10 * version - 9, 10 * version), objects=tuple(objects),
            tensors=every if old is None else {name: every[name] for name in names},
            state_digest=state_digest(every), model_fingerprint=model_fingerprint(every),
            changed_elements=sum(delta.changed for delta in deltas), total_elements=12,
            codec=DEFAULT_CODEC if deltas else None, prompt_cache="all", created_at=1000.5 + version, extra=extra,
            **about,
        )  # fmt: skip
        self.store.create(manifest.key, manifest.to_bytes())
        hint = Head(RUN, self.epoch, self.writer, version, manifest.sha256)
        self.store.put(HEAD, hint.to_bytes())
        self.expected[manifest.sha256] = {
            "key": manifest.key,
            "bits": {name: [f"{int(value):0{2 * new[name].itemsize}x}" for value in new[name]] for name in sorted(new)},
        }
        return manifest

    def adapter(
        self, parent: Manifest, config: AdapterConfig, values: dict[str, tuple[list[int], tuple[int, ...]]]
    ) -> Manifest:
        version = parent.version + 1
        kind = dtype("BF16")
        tensors = [(name, kind, shape, np.array(bits, kind.carrier)) for name, (bits, shape) in values.items()]
        data = encode_adapter(RUN, version, config, tensors)
        sha256 = hashlib.sha256(data).hexdigest()
        ref = ObjectRef(adapter_key(version, self.epoch, sha256), len(data), sha256)
        self.store.put(ref.key, data)
        elements = sum(bits.size for *_, bits in tensors)
        manifest = replace(
            parent, epoch=self.epoch, writer=self.writer, version=version, kind="adapter", base_version=version - 1,
            parent=parent.sha256, steps=(10 * version - 9, 10 * version), objects=(ref,),
            tensors={n: TensorState("BF16", shape, digest(bits, tensor_key(n))) for n, _, shape, bits in tensors},
            changed_elements=elements, total_elements=elements,
            codec=None, created_at=1000.5 + version,
        )  # fmt: skip
        self.store.create(manifest.key, manifest.to_bytes())
        self.store.put(HEAD, Head(RUN, self.epoch, self.writer, version, manifest.sha256).to_bytes())
        self.expected[manifest.sha256] = {
            "key": manifest.key,
            "adapter": {name: [f"{bit:04x}" for bit in bits] for name, (bits, _) in values.items()},
        }
        return manifest

    def anchor(self, manifest: Manifest, bits: Bits) -> None:
        folder = anchor_folder(manifest.version, manifest.epoch)
        tensors = [(name, dtype(DTYPES[name]), SHAPES[name], bits[name]) for name in sorted(bits)]
        with tempfile.TemporaryDirectory() as scratch:
            files = write_anchor_files(Path(scratch), tensors, shard_bytes=20, header_bytes=512)
            contents = {name: path.read_bytes() for name, path in files.items()} | {"config.json": b"{}\n"}
        refs = []
        for name, data in sorted(contents.items()):
            self.store.put(folder + name, data)
            refs.append(ObjectRef(folder + name, len(data), hashlib.sha256(data).hexdigest()))
        record = AnchorRecord(
            manifest.version, manifest.epoch, manifest.sha256, manifest.state_digest, tuple(refs), states(bits), 2000.25
        )
        self.store.put(anchor_key(manifest.version, manifest.epoch), record.to_bytes())


def make(folder: Path) -> None:
    golden = Golden(folder / "run")
    golden.claim(1, "trainer-a")
    bits = [bits_of(FIRST)]
    for name, index, value in (("layer.weight", 0, 0x3F81), ("größe.weight", 1, 0), ("scale", 0, 0xB8)):
        bits.append({**bits[-1], name: bits[-1][name].copy()})
        bits[-1][name][index] = value
    bits[2]["layer.weight"] = bits[2]["layer.weight"].copy()
    bits[2]["layer.weight"][7] = 0x0000  # version 3 changes two tensors
    bits[3]["layer.weight"] = bits[2]["layer.weight"]
    first = golden.manifest(None, None, bits[0], {})
    golden.anchor(first, bits[0])
    second = golden.manifest(first, bits[0], bits[1], {"future": {"kept": [1, 2.5, None, "ü"]}})
    third = golden.manifest(second, bits[1], bits[2], {})
    golden.manifest(third, bits[2], bits[3], {})
    golden.claim(2, "trainer-b")
    resumed_bits = bits_of({**FIRST, "scale": [0x01]})
    resumed = golden.manifest(third, None, resumed_bits, {})
    golden.anchor(resumed, resumed_bits)
    after = {**resumed_bits, "layer.weight": resumed_bits["layer.weight"] ^ np.uint16(1)}
    newest = golden.manifest(resumed, resumed_bits, after, {})
    empty = golden.manifest(newest, after, after, {})
    live = Ack("replica-0", empty.version, empty.sha256, 2, "live", None, None, None, None, 3000.0)
    refused = Ack(
        "replica-1", resumed.version, resumed.sha256, 2, "refused", newest.version, newest.objects[0].key,
        "IntegrityError", "sha256 of object: expected …, got …", 3000.5,
    )  # fmt: skip
    for ack in (live, refused):
        golden.store.put(ack.key, ack.to_bytes())
    expected = {"newest": empty.sha256, "versions": golden.expected, "dtypes": DTYPES, "shapes": SHAPES}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def make_folded(folder: Path) -> None:
    golden = Golden(folder / "run")
    golden.claim(1, "trainer-a")
    bits = [bits_of(FIRST)]
    for changes in (
        {"layer.weight": {0: 0x3F81, 7: 0x0000}, "scale": {0: 0xB8}},
        {"layer.weight": {0: 0x3F80, 2: 0x7FC0}},  # element 0 goes back: no step is left of it
        {"größe.weight": {1: 0x3F800000}, "layer.weight": {7: 0x8000, 2: 0x7FC1}},
    ):
        after = {name: values.copy() for name, values in bits[-1].items()}
        for name, places in changes.items():
            for index, value in places.items():
                after[name][index] = value
        bits.append(after)
    versions = [golden.manifest(None, None, bits[0], {})]
    golden.anchor(versions[0], bits[0])
    for before, after in pairwise(bits):
        versions.append(golden.manifest(versions[-1], before, after, {}))
    changes = (diff(name, dtype(DTYPES[name]), SHAPES[name], bits[0][name], bits[3][name]) for name in sorted(FIRST))
    touched = {name: state for manifest in versions[1:] for name, state in manifest.tensors.items()}
    fold = attach_fold(golden.store, versions[0], versions[3], [delta for delta in changes if delta.changed], touched)
    golden.store.put(fold_key(4, 1, 1), replace(fold, created_at=2000.75).to_bytes())
    expected = {"newest": versions[3].sha256, "versions": golden.expected, "dtypes": DTYPES, "shapes": SHAPES}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def make_measured(folder: Path) -> None:
    golden = Golden(folder / "run")
    golden.claim(1, "trainer-a")
    before = bits_of(FIRST)
    after = {**before, "scale": before["scale"] ^ np.uint8(1)}
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    first = golden.manifest(None, None, before, {}, traceparent=trace)
    golden.anchor(first, before)
    numbers = {"reward": -0.25, "loss": 1e-07, "rewards/letters_placed/mean": 0.5, "num_tokens": 4096}
    newest = golden.manifest(first, before, after, {}, metrics=numbers, traceparent=trace)
    performance = {
        "noticed_seconds": 0.2, "stage_seconds": 0.05, "commit_seconds": 0.001, "served_seconds": 0.3,
        "gap_seconds": 0.02, "fetched_bytes": 510,
    }  # fmt: skip
    ack = Ack("replica-0", 2, newest.sha256, 1, "live", None, None, None, None, 3000.0, performance)
    golden.store.put(ack.key, ack.to_bytes())
    expected = {"newest": newest.sha256, "versions": golden.expected, "dtypes": DTYPES, "shapes": SHAPES}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


def make_adapters(folder: Path) -> None:
    golden = Golden(folder / "run")
    golden.claim(1, "trainer-a")
    base = bits_of(FIRST)
    origin = golden.manifest(None, None, base, {})
    golden.anchor(origin, base)
    config = AdapterConfig(1, 2, ("layer",), base_model="golden/base", task_type="CAUSAL_LM")
    a, b = (f"base_model.model.layer.lora_{part}.weight" for part in "AB")
    second = golden.adapter(origin, config, {a: ([0x3F80, 0xBF80, 0x0000, 0x8000], (1, 4)), b: ([0, 0], (2, 1))})
    third = golden.adapter(
        second, config, {a: ([0x3F81, 0xBF80, 0x7FC1, 0x8000], (1, 4)), b: ([0x3E00, 0xBE00], (2, 1))}
    )
    golden.claim(2, "trainer-b")
    newest = golden.adapter(third, config, {a: ([0x4000, 0xBF80, 0, 0], (1, 4)), b: ([0x3E00, 0x8000], (2, 1))})
    expected = {"newest": newest.sha256, "versions": golden.expected, "dtypes": DTYPES, "shapes": SHAPES}
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    target = Path(sys.argv[1])
    target.mkdir(parents=True)
    makers = {"golden-1": make, "golden-2": make_folded, "golden-3": make_measured, "golden-4": make_adapters}
    makers[target.name](target)
