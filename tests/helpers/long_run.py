"""A run of thousands of versions in seconds: true manifests in a folder, chained by hash, and objects that repeat.

Its digests are made up, as nothing that only reads a ledger looks at them; it can't be served.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path

import numpy as np

from delta_sync.ack import Ack
from delta_sync.delta_file import encode_delta
from delta_sync.delta_header import DeltaHeader
from delta_sync.dtypes import dtype
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.manifest import AnchorRecord, FoldRecord, Manifest, ObjectRef, TensorState
from delta_sync.records import Epoch, Head
from delta_sync.store.keys import HEAD, anchor_folder, anchor_key, delta_key, fold_key
from delta_sync.tensor_delta import TensorDelta

RUN = "0123456789abcdef0123456789abcdef"
LAYERS = 4
OBJECTS_REPEAT = 32  # versions share one delta: to code 5,000 of them takes half a minute
KINDS = ("self_attn.q_proj", "mlp.down_proj")
SHAPE = (64, 32)
TENSORS = {
    "model.embed_tokens.weight": SHAPE,
    **{f"model.layers.{layer}.{kind}.weight": SHAPE for layer in range(LAYERS) for kind in KINDS},
}
TOTAL = len(TENSORS) * math.prod(SHAPE)


class LongRun:
    """Appends versions to a folder, ``seconds`` apart by their own account."""

    def __init__(self, folder: Path, *, started: float, seconds: float = 7.0) -> None:
        self.folder, self._started, self._seconds = folder, started, seconds
        self.epoch, self.newest = 0, None
        self._delta: tuple[bytes, int] | None = None
        self._random = np.random.default_rng(3)
        self.claim()

    def claim(self) -> None:
        """Take the next epoch."""
        self.epoch += 1
        self._put(f"epochs/{self.epoch:06d}.json", Epoch(RUN, self.epoch, self.writer, self._started).to_bytes())

    @property
    def writer(self) -> str:
        return f"trainer-{self.epoch}"

    def grow(self, count: int) -> None:
        """Append versions, then HEAD."""
        for _ in range(count):
            self._append()
        newest = self.newest
        self._put(HEAD, Head(RUN, self.epoch, newest.writer, newest.version, newest.sha256).to_bytes())

    def acknowledge(self, replica: str, version: int, manifest: str, **said: object) -> None:
        """What a replica says of itself."""
        nothing = dict.fromkeys(("refused_version", "refused_object", "error_kind", "error"))
        about = {"state": "live", "time": self._started + version * self._seconds, **nothing, **said}
        ack = Ack(replica, version, manifest, self.epoch, **about)
        self._put(ack.key, ack.to_bytes())

    def attach(self, *, fold_from: int | None = None) -> None:
        """Attach an anchor to the newest version, or a fold that begins at an older one; none has its objects."""
        newest, tensors = self.newest, {name: TensorState("BF16", SHAPE, 1) for name in TENSORS}
        about = {
            "version": newest.version,
            "epoch": newest.epoch,
            "manifest": newest.sha256,
            "state_digest": newest.state_digest,
            "tensors": tensors,
            "created_at": newest.created_at,
        }
        if fold_from is None:
            key = anchor_key(newest.version, newest.epoch)
            shard = ObjectRef(anchor_folder(newest.version, newest.epoch) + "model.safetensors", 2 * TOTAL, "0" * 64)
            record = AnchorRecord(objects=(shard,), **about)
        else:
            key = fold_key(newest.version, newest.epoch, fold_from)
            base = {"base_version": fold_from, "base_manifest": "0" * 64}
            record = FoldRecord(run=RUN, objects=(), codec=DEFAULT_CODEC, **base, **about)
        self._put(key, record.to_bytes())

    def _append(self) -> None:
        version = self.newest.version + 1 if self.newest else 1
        names = list(TENSORS)
        objects, changed = (), 0
        if version > 1:
            if self._delta is None or version % OBJECTS_REPEAT == 0:
                self._delta = self._new_delta(version)
            data, changed = self._delta
            sha256 = hashlib.sha256(data).hexdigest()
            objects = (ObjectRef(delta_key(version, self.epoch, sha256), len(data), sha256),)
            self._put(objects[0].key, data)
        self.newest = Manifest(
            run=RUN,
            epoch=self.epoch,
            writer=self.writer,
            version=version,
            kind="delta" if version > 1 else "origin",
            base_version=version - 1 if version > 1 else None,
            parent=self.newest.sha256 if self.newest else None,
            steps=(version - 1, version - 1),
            objects=objects,
            tensors={name: TensorState("BF16", SHAPE, version) for name in names},
            state_digest=f"{version:064x}",
            model_fingerprint=f"{1:064x}",
            changed_elements=changed,
            total_elements=TOTAL,
            codec=DEFAULT_CODEC if objects else None,
            prompt_cache="none",
            created_at=self._started + version * self._seconds,
        )
        self.newest.__dict__["_encoded"] = self.newest._canonical()  # unchecked here: whoever reads it checks
        self._put(self.newest.key, self.newest.to_bytes())

    def _new_delta(self, version: int) -> tuple[bytes, int]:
        """Later layers change more, all of them less and less."""
        deltas = []
        for at, (name, shape) in enumerate(TENSORS.items()):
            size = math.prod(shape)
            share = 0.002 + 0.05 * (at + 1) / len(TENSORS) / (1 + version / 400)
            count = int(self._random.binomial(size, share))
            positions = np.sort(self._random.choice(size, count, replace=False)).astype(np.int64)
            values = self._random.integers(1, 4, count).astype(np.uint16)
            deltas.append(TensorDelta(name, dtype("BF16"), shape, "ulp", positions, values))
        deltas = [delta for delta in deltas if delta.changed]
        header = DeltaHeader(RUN, version, version - 1, DEFAULT_CODEC, {})
        return encode_delta(header, deltas), sum(delta.changed for delta in deltas)

    def _put(self, key: str, data: bytes) -> None:
        path = self.folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
