"""A tiny model whose every version is committed for real, and the bits that each version must give."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from delta_sync import (
    DEFAULT_CODEC,
    DeltaHeader,
    Manifest,
    TensorState,
    apply,
    decode_delta,
    diff,
    dtype,
    encode_delta,
    model_fingerprint,
    state_digest,
    tensor_key,
)
from delta_sync.anchor_files import iter_anchor_tensors, write_anchor_files
from delta_sync.digest import digest
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.plan import Plan
from delta_sync.writer import Writer

BF16 = dtype("BF16")
SHAPES = {"embed.weight": (6, 4), "layer.weight": (4, 4), "norm.weight": (4,)}
TOTAL = 24 + 16 + 4
Bits = dict[str, np.ndarray]


def first_bits(seed: int = 0) -> Bits:
    rng = np.random.default_rng(seed)
    return {name: rng.integers(0, 2**16, int(np.prod(shape)), dtype=np.uint16) for name, shape in SHAPES.items()}


def states(bits: Mapping[str, np.ndarray]) -> dict[str, TensorState]:
    return {name: TensorState("BF16", SHAPES[name], digest(bits[name], tensor_key(name))) for name in bits}


def changed(bits: Bits, number: int) -> Bits:
    """The bits of the next version: one element of one tensor differs, another each time."""
    name = sorted(bits)[number % len(bits)]
    after = bits[name].copy()
    after[number % after.size] += 1 + number
    return {**bits, name: after}


def delta_object(run: str, version: int, old: Bits, new: Bits) -> bytes:
    names = [name for name in old if not np.array_equal(old[name], new[name])]
    deltas = [diff(name, BF16, SHAPES[name], old[name], new[name]) for name in names]
    return encode_delta(DeltaHeader(run, version, version - 1, DEFAULT_CODEC), deltas)


def commit_origin(writer: Writer, bits: Bits, step: int = 0) -> Manifest:
    every = states(bits)
    return writer.commit(
        "origin", (step, step), every, state_digest(every), model_fingerprint(every), [],
        changed=0, total=TOTAL, codec=None, prompt_cache="all",
    )  # fmt: skip


def commit_delta(writer: Writer, old: Bits, new: Bits, step: int = 1) -> Manifest:
    every = states(new)
    touched = {name: every[name] for name in old if not np.array_equal(old[name], new[name])}
    version = writer.next_version
    return writer.commit(
        "delta", (step, step), touched, state_digest(every), model_fingerprint(every),
        [delta_object(writer.run, version, old, new)] if touched else [],
        changed=len(touched), total=TOTAL, codec=DEFAULT_CODEC, prompt_cache="all",
    )  # fmt: skip


def attach(writer: Writer, manifest: Manifest, bits: Bits, folder: Path, shard_bytes: int = 1 << 20) -> None:
    tensors = [(name, BF16, SHAPES[name], bits[name]) for name in bits]
    files = write_anchor_files(folder, tensors, shard_bytes=shard_bytes)
    writer.attach_anchor(manifest, {**files, "config.json": b"{}"}, states(bits))


def follow(ledger: Ledger, plan: Plan, bits: Bits | None) -> Bits:
    """What a replica does: take the anchor if told so, apply the deltas, prove the result."""
    if plan.start == "anchor":
        bits = {name: found.copy() for name, _, _, found in iter_anchor_tensors(ledger, plan.anchor)}
    bits = {name: found.copy() for name, found in bits.items()}
    for manifest in plan.deltas:
        for ref in manifest.objects:
            for delta in decode_delta(ledger.read_object(ref))[1]:
                apply(delta, bits[delta.name])
    now = states(bits)
    assert state_digest(now) == plan.target.state_digest
    assert all(now[name] == state for name, state in plan.tensors.items())
    return bits


class TinyRun:
    """A writer and the bits of every version that it committed."""

    def __init__(self, store, writer: str | None = None, key: SigningKey | None = None) -> None:
        self.store = store
        self.writer = Writer.open(Ledger(store), writer=writer, key=key)
        self.bits: dict[str, Bits] = {}  # by manifest sha256
        self.now = first_bits()
        self.number = 0

    def origin(self, bits: Bits | None = None) -> Manifest:
        self.now = self.now if bits is None else bits
        manifest = commit_origin(self.writer, self.now)
        self.bits[manifest.sha256] = self.now
        return manifest

    def delta(self) -> Manifest:
        self.number += 1
        after = changed(self.now, self.number)
        manifest = commit_delta(self.writer, self.now, after, self.number)
        self.now = after
        self.bits[manifest.sha256] = after
        return manifest

    def anchor(self, folder: Path, manifest: Manifest | None = None) -> None:
        manifest = manifest or self.writer.head
        attach(self.writer, manifest, self.bits[manifest.sha256], folder)

    def check(self, plan: Plan, bits: Bits | None) -> Bits:
        """Follow a plan and compare bit by bit with what was committed."""
        result = follow(Ledger(self.store), plan, bits)
        expected = self.bits[plan.target.sha256]
        assert result.keys() == expected.keys()
        assert all(np.array_equal(result[name], expected[name]) for name in expected)
        return result
