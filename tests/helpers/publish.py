"""A stand-in for the trainer: holds a checkpoint's bits, changes some, publishes deltas and anchors with the core."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from delta_sync.adapter import AdapterConfig, encode_adapter
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import encode_deltas_against
from delta_sync.delta import diff
from delta_sync.delta_file import DeltaHeader, encode_delta
from delta_sync.digest import digest, model_fingerprint, state_digest, tensor_key
from delta_sync.dtypes import DType, dtype
from delta_sync.gap_codec import DEFAULT_CODEC as CODEC
from delta_sync.keys import SigningKey
from delta_sync.ledger import Ledger
from delta_sync.manifest import AnchorRecord, Manifest, PromptCache, TensorState
from delta_sync.store.open import open_store
from delta_sync.tensor_delta import TensorDelta
from delta_sync.writer import Writer, adapter_ref

Bits = np.ndarray[Any, np.dtype[Any]]
Weights = dict[str, Bits]


class Publisher:
    """One epoch of a run. ``weights`` are carrier arrays in their tensors' shapes; change them, then ``delta``."""

    def __init__(
        self,
        uri: str,
        weights: Mapping[str, Bits],
        dtypes: Mapping[str, str] | str = "BF16",
        *,
        key: SigningKey | None = None,
        ack_uri: str | None = None,
    ) -> None:
        self.ledger = Ledger(open_store(uri), acks=open_store(ack_uri) if ack_uri else None)
        self.writer = Writer.open(self.ledger, key=key)
        self.weights: Weights = {name: value.copy() for name, value in weights.items()}
        self.published: Weights = {name: value.copy() for name, value in weights.items()}
        self._dtypes = dtypes
        self.prompt_cache: PromptCache = "none"  # of what is published next
        self.metrics: dict[str, float] = {}  # likewise
        self.steps = (0, 0)  # likewise
        self.tiles: int | None = None  # parts along rows and columns of context-coded deltas; None: gap-coded
        self.ranks = 1  # among which the rows of every tensor are dealt out, as FSDP does: each writes an object
        self.objects: dict[int, list[bytes]] = {}

    @classmethod
    def of_checkpoint(cls, uri: str, folder: Path, **settings: Any) -> Publisher:
        """Begin with the bits of a one-shard checkpoint."""
        weights, dtypes = read_checkpoint(folder)
        return cls(uri, weights, dtypes, **settings)

    def dtype(self, name: str) -> DType:
        """A tensor's element type."""
        return dtype(self._dtypes if isinstance(self._dtypes, str) else self._dtypes[name])

    def states(self, weights: Mapping[str, Bits] | None = None) -> dict[str, TensorState]:
        """Every tensor's state, from scratch."""
        weights = self.weights if weights is None else weights
        return {
            name: TensorState(self.dtype(name).name, bits.shape, digest(bits.reshape(-1), tensor_key(name)))
            for name, bits in weights.items()
        }

    def origin(self, anchor: bool = False, files: Mapping[str, bytes] | None = None) -> Manifest:
        """Publish the present weights as the start of a chain, with or without an anchor."""
        states = self.states()
        manifest = self._commit("origin", states, states, [], 0)
        if anchor:
            self.anchor(manifest, files)
        return manifest

    def delta(self, corrupt: str | None = None) -> Manifest:
        """Publish what changed since the last version.

        corrupt: "content" publishes a good object whose bits are not those the manifest proves;
        "object" one that is damaged in the store before the manifest makes it visible (``heal`` repairs it).
        """
        states = self.states()
        before = self.published
        deltas = [
            diff(n, self.dtype(n), w.shape, before[n].reshape(-1), w.reshape(-1)) for n, w in self.weights.items()
        ]
        deltas = [d for d in deltas if d.changed]
        touched = {d.name: states[d.name] for d in deltas}
        version = (self.writer.head.version if self.writer.head else 0) + 1
        header = DeltaHeader(self.writer.run, version, version - 1, CODEC, {})
        if corrupt == "content":
            deltas[0].values[0] ^= 1 << 2
        objects = [encode_delta(header, part) for rank in range(self.ranks) if (part := self._part(rank, deltas))]
        if self.tiles is not None:
            grid = (self.tiles, self.tiles)
            header, data = encode_deltas_against(header, deltas, lambda name, *_: before[name].reshape(-1), grid)
            assert header.codec == CONTEXT_CODEC, "a change that the gap codec writes shorter tests nothing"
            objects = [data]
        if corrupt == "object":
            return self._commit_damaged(states, touched, objects, sum(d.changed for d in deltas))
        return self._commit("delta", states, touched, objects, sum(d.changed for d in deltas), header.codec)

    def _part(self, rank: int, deltas: list[TensorDelta]) -> list[TensorDelta]:
        """What one of several ranks holds of these changes: described as of the whole tensors."""
        found = []
        for delta in deltas:
            rows = -(-delta.shape[0] // self.ranks) if delta.shape else 1
            held = delta.positions // (rows * math.prod(delta.shape[1:])) == rank
            if held.any():
                found.append(replace(delta, positions=delta.positions[held], values=delta.values[held]))
        return found

    def adapter(self, seed: int, module: str = "w") -> Manifest:
        """Publish a LoRA adapter of rank 1 for one matrix; the weights stay as they are."""
        random = np.random.default_rng(seed)
        rows, columns = self.weights[module].shape
        kind = dtype("BF16")
        tensors = [
            (f"base_model.model.{module}.lora_{part}.weight", kind, shape, random.integers(0, 2**14, n).astype("<u2"))
            for part, shape, n in (("A", (1, columns), columns), ("B", (rows, 1), rows))
        ]
        data = encode_adapter(self.writer.run, self.writer.next_version, AdapterConfig(1, 1, (module,)), tensors)
        ref = adapter_ref(self.writer.next_version, self.writer.epoch, data)
        self.ledger.store.put(ref.key, data)
        states = {name: TensorState("BF16", shape, digest(bits, tensor_key(name))) for name, _, shape, bits in tensors}
        base, size = self.states(), rows + columns
        return self.writer.commit(
            "adapter", self.steps, states, state_digest(base), model_fingerprint(base), [ref], changed=size, total=size,
            codec=None, prompt_cache=self.prompt_cache,
        )  # fmt: skip

    def step(self, seed: int, fraction: float = 0.02, corrupt: str | None = None) -> Manifest:
        """Change a random share of every tensor and publish it."""
        self.change(seed, fraction)
        return self.delta(corrupt)

    def change(self, seed: int, fraction: float = 0.02) -> None:
        """Change a random share of every tensor: other values of about the same size, so that outputs change too."""
        random = np.random.default_rng(seed)
        for bits in self.weights.values():
            flat = bits.reshape(-1)
            count = max(1, int(flat.size * fraction))
            at = random.choice(flat.size, count, replace=False)
            flat[at] = flat[random.permutation(at)] ^ random.integers(1, 64, count).astype(flat.dtype)

    def anchor(self, manifest: Manifest, files: Mapping[str, bytes] | None = None) -> AnchorRecord:
        """Attach the present weights to a version as complete weights."""
        with tempfile.TemporaryDirectory() as folder:
            content: dict[str, Path | bytes] = dict(files or {})
            if not files:
                write_checkpoint(Path(folder), self.weights, self.dtype)
                content = {path.name: path for path in Path(folder).iterdir()}
            return self.writer.attach_anchor(manifest, content, self.states())

    def save(self, folder: Path, like: Path) -> Path:
        """Write the present weights as a checkpoint a fresh engine can start from; the rest is copied from ``like``."""
        shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        write_checkpoint(folder, self.weights, self.dtype)
        return folder

    def damage(self, manifest: Manifest) -> None:
        """Overwrite a version's first object with other bytes of the same size."""
        ref = manifest.objects[0]
        data = bytearray(self.ledger.store.get(ref.key, max_bytes=ref.size))
        data[-1] ^= 1
        self.ledger.store.put(ref.key, bytes(data))

    def heal(self, manifest: Manifest) -> None:
        """Write a version's objects again as they were."""
        self.writer.republish(manifest, self.objects[manifest.version])

    def _commit_damaged(
        self, states: dict[str, TensorState], tensors: dict[str, TensorState], objects: list[bytes], n: int
    ) -> Manifest:
        store = self.ledger.store
        put = store.put

        def put_damaged(key: str, data: bytes | memoryview) -> None:
            put(key, bytes(data[:-1]) + bytes([data[-1] ^ 1]) if key.startswith("deltas/") else data)

        store.put = put_damaged  # type: ignore[method-assign]
        try:
            return self._commit("delta", states, tensors, objects, n)
        finally:
            del store.put  # type: ignore[method-assign]

    def _commit(
        self,
        kind: Any,
        states: dict[str, TensorState],
        tensors: dict[str, TensorState],
        objects: list[bytes],
        n: int,
        codec: str = CODEC,
    ) -> Manifest:
        manifest = self.writer.commit(
            kind,
            self.steps,
            tensors,
            state_digest(states),
            model_fingerprint(states),
            objects,
            changed=n,
            total=sum(w.size for w in self.weights.values()),
            codec=codec if objects else None,
            prompt_cache=self.prompt_cache,
            metrics=self.metrics,
        )
        self.published = {name: value.copy() for name, value in self.weights.items()}
        self.objects[manifest.version] = objects
        return manifest


def read_checkpoint(folder: Path) -> tuple[Weights, dict[str, str]]:
    """Carrier arrays and element types of every tensor in a one-shard checkpoint."""
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    weights, dtypes = {}, {}
    for name, entry in json.loads(data[8 : 8 + size]).items():
        if name != "__metadata__":
            start, end = (8 + size + offset for offset in entry["data_offsets"])
            carrier = dtype(entry["dtype"]).carrier
            weights[name] = np.frombuffer(data[start:end], carrier).reshape(entry["shape"]).copy()
            dtypes[name] = entry["dtype"]
    return weights, dtypes


def write_checkpoint(folder: Path, weights: Mapping[str, Bits], dtype_of: Any) -> None:
    """Write ``model.safetensors``."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, bits in weights.items():
        header[name] = {
            "dtype": dtype_of(name).name,
            "shape": list(bits.shape),
            "data_offsets": [offset, offset + bits.nbytes],
        }
        offset += bits.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for bits in weights.values():
            file.write(np.ascontiguousarray(bits).tobytes())
