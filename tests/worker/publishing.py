"""A trainer's publishing side, reduced to what the worker's tests need."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from delta_sync import DTYPES, diff, encode_delta, model_fingerprint, state_digest, tensor_key
from delta_sync.anchor_files import write_anchor_files
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, encode_against
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader
from delta_sync.digest import digest
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest, TensorState
from delta_sync.store.open import open_store
from delta_sync.tensor_delta import TensorDelta
from delta_sync.writer import Writer


def bits(tensor: torch.Tensor) -> np.ndarray:
    """A tensor's bits, flat uint16, (float32) uint32 or (float8) uint8."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().view(f"<u{tensor.element_size()}")


def element(tensor: torch.Tensor, dtype: str) -> str:
    """The published element type: ``dtype`` for all tensors of 16 bits."""
    return {torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}.get(tensor.dtype, dtype)


def states(tensors: Mapping[str, torch.Tensor], dtype: str = "BF16") -> dict[str, TensorState]:
    """Every tensor's published state."""
    return {
        n: TensorState(element(t, dtype), tuple(t.shape), digest(bits(t), tensor_key(n))) for n, t in tensors.items()
    }


def nudged(tensors: Mapping[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    """Copies with a random share (at least one) of each tensor's elements changed."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, tensor in tensors.items():
        value = tensor.clone()
        flat = bits(value)
        at = rng.choice(flat.size, max(1, int(flat.size * share)), replace=False)
        flat[at] += rng.integers(1, 400, at.size).astype(flat.dtype)
        out[name] = value
    return out


def small_ones_stepped(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copies whose elements below 2**-7 went up by one step, as an optimizer moves small weights most."""
    out = {name: tensor.clone() for name, tensor in tensors.items()}
    for value in out.values():
        flat = bits(value)
        flat[(flat >> 7 & 0xFF) < 120] += 1
    return out


def share(delta: TensorDelta, rank: int, ranks: int) -> TensorDelta:
    """What a rank that holds every ``ranks``-th element of a tensor publishes of its delta."""
    mine = delta.positions % ranks == rank
    return replace(delta, positions=delta.positions[mine], values=delta.values[mine])


class Publisher:
    """Publishes versions of a set of 16-bit tensors into a local folder."""

    dtype = "BF16"
    context = False  # whether deltas are coded against the bits they change
    per_tensor = False  # whether every tensor's changes are an object
    ranks = 1  # how many ranks share every tensor, each writing an object of its own

    def __init__(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        self.uri = str(folder)
        self.ledger = Ledger(open_store(self.uri))
        self._folder = folder
        self._writer = Writer.open(self.ledger, run="test")
        self.tensors = dict(tensors)
        self.origin = self._commit("origin", states(self.tensors, self.dtype), [], 0)

    def delta(self, new: Mapping[str, torch.Tensor], claimed: Mapping[str, torch.Tensor] | None = None) -> Manifest:
        """Publish the step to ``new``; the manifest's digests are those of ``claimed`` if it is given."""
        version = self._writer.head.version + 1
        deltas = [
            diff(n, DTYPES[element(new[n], self.dtype)], new[n].shape, bits(self.tensors[n]), bits(new[n])) for n in new
        ]
        deltas = [d for d in deltas if d.changed]
        header = DeltaHeader("test", version, version - 1, DEFAULT_CODEC)
        objects = [encode_delta(header, [share(d, rank, self.ranks) for d in deltas]) for rank in range(self.ranks)]
        if self.per_tensor:
            objects = [encode_delta(header, [d]) for d in deltas]
        if self.context:
            header, data, _ = encode_against(header, [self._change(name, new[name]) for name in new])
            assert header.codec == CONTEXT_CODEC, "a change that the gap codec writes shorter tests nothing"
            objects = [data]
        self.tensors = dict(new if claimed is None else claimed)
        after = states(self.tensors, self.dtype)
        count = sum(d.changed for d in deltas)
        return self._commit("delta", {d.name: after[d.name] for d in deltas}, objects, count, header.codec)

    def _change(self, name: str, new: torch.Tensor) -> Change:
        return Change(name, DTYPES[self.dtype], tuple(new.shape), bits(self.tensors[name]), bits(new))

    def anchor(self, tensors: Mapping[str, torch.Tensor] | None = None) -> None:
        """Attach complete weights to the newest version."""
        values = self.tensors if tensors is None else tensors
        folder = self._folder.parent / f"{self._folder.name}-anchor-{self._writer.head.version}"
        files = write_anchor_files(
            folder, ((n, DTYPES[element(t, self.dtype)], tuple(t.shape), bits(t)) for n, t in values.items())
        )
        self._writer.attach_anchor(self._writer.head, files, states(self.tensors, self.dtype))

    def object_path(self, manifest: Manifest) -> Path:
        """Where a version's first object lies on disk."""
        return self._folder / manifest.objects[0].key

    def _commit(
        self, kind: str, changed: Mapping[str, TensorState], objects: list[bytes], count: int, codec: str | None = None
    ) -> Manifest:
        everything = states(self.tensors, self.dtype)
        return self._writer.commit(
            kind,
            (0, 0),
            changed,
            state_digest(everything),
            model_fingerprint(everything),
            objects,
            changed=count,
            total=sum(math.prod(t.shape) for t in self.tensors.values()),
            codec=codec,
            prompt_cache="all",
        )
