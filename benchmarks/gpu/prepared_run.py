"""Versions published by the product before they are needed, then given to replicas one at a time.

No trainer works beside what is measured, and objects are cut and coded as a trainer does it.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from delta_sync.digest import digest, tensor_key
from delta_sync.dtypes import dtype
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback.chain import Chain
from trl_callback.config import DeltaSyncConfig
from trl_callback.gpu_snapshot import snapshot_of
from trl_callback.metrics import Metrics
from trl_callback.publisher import Publisher
from trl_callback.serving_image import ServingImage

LIMIT = 300.0  # seconds until a version is in the store
HEAD = "HEAD.json"


class PreparedRun:
    """A run in ``made``, of which replicas that follow ``given`` see what ``give`` has let them see."""

    def __init__(self, model: PreTrainedModel, made: Path, given: Path) -> None:
        self.model, self._made, self._given = model, made, given
        self._versions: list[tuple[list[Path], bytes]] = []  # of each: files in order, and what HEAD says then
        self._known: set[Path] = set()
        self._image = ServingImage(model, lambda name: "BF16")
        config = DeltaSyncConfig.build(str(made), anchor_every=0, anchor_chain_ratio=0.0)
        where = "cuda" if next(model.parameters()).is_cuda else "cpu"
        snapshot = snapshot_of(self._image, where, config.bucket_bytes)
        chain = Chain(Ledger(open_store(str(made))), snapshot, config, {"config.json": b"{}"}, 0)
        self._publisher = Publisher(chain, snapshot, config, Metrics())
        self._publisher.start()
        self._keep()
        given.mkdir()

    @property
    def elements(self) -> int:
        """How many the model has."""
        return sum(weights.numel() for weights in self.model.parameters())

    @torch.no_grad()
    def prepare(self, fraction: float) -> None:
        """One step up or down in a random share of every tensor's elements, as an optimizer's step does it."""
        for weights in self.model.parameters():
            flat = weights.view(torch.int16).view(-1)
            count = max(1, int(flat.numel() * fraction))
            at = torch.randint(flat.numel(), (count,), device=flat.device)
            flat[at] = flat[at] ^ 1
        self._publisher.capture(self._image, len(self._versions))
        self._publisher.flush(LIMIT)
        self._keep()

    def give(self, number: int) -> None:
        """Let replicas see this version, from 0, the origin, on; its objects are there before its manifest."""
        files, head = self._versions[number]
        for path in files:
            target = self._given / path
            target.parent.mkdir(parents=True, exist_ok=True)
            os.link(self._made / path, target)
        new = self._given / (HEAD + ".new")
        new.write_bytes(head)
        new.replace(self._given / HEAD)

    def close(self) -> None:
        """End the publisher's thread."""
        self._publisher.stop()

    def digests(self) -> dict[str, int]:
        """Of the trainer's weights now, each tensor's digest."""
        kind, found = dtype("BF16"), {}
        for name, weights in self.model.named_parameters():
            bits = weights.detach().view(torch.int16).cpu().numpy().view(kind.carrier)
            found[name] = digest(bits.reshape(-1), tensor_key(name))
        return found

    def save(self, folder: Path, like: Path) -> Path:
        """The weights now as a checkpoint that a fresh engine can start from; the rest is copied from ``like``."""
        shutil.copytree(like, folder, ignore=shutil.ignore_patterns("*.safetensors"))
        self.model.save_pretrained(folder, max_shard_size="1TB")
        return folder

    def _keep(self) -> None:
        there = {p.relative_to(self._made) for p in self._made.rglob("*") if p.is_file()} - {Path(HEAD)}
        new = sorted(there - self._known, key=lambda path: (path.parts[0] == "manifests", str(path)))
        self._known |= there
        self._versions.append((new, (self._made / HEAD).read_bytes()))
