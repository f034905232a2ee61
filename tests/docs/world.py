"""What the documentation's examples talk about: a run, a key, a disk, a bucket; and how their names are replaced."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from helpers.publish import Publisher

from delta_sync.ack import Ack
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B")
SERVERS = ("http://rollouts:8000", "http://localhost:8000", "localhost:8000")


@dataclass
class World:
    """A folder to run in, and what stands for the names that the pages use."""

    folder: Path
    made: Path  # where the run and its checkpoints were made
    names: dict[str, str]

    @property
    def run(self) -> Path:
        """Where the run lies."""
        return Path(self.names["/mnt/run"])

    def real(self, code: str) -> str:
        """The code with the names replaced, longest first."""
        for name in sorted(self.names, key=len, reverse=True):
            code = code.replace(name, self.names[name])
        return code


def make_run(folder: Path, checkpoint: Path) -> Publisher:
    """Eight versions, anchors of 1 and 5 that hold the model's config and tokenizer, and three replicas."""
    run = Publisher.of_checkpoint(str(folder), checkpoint)
    files = {p.name: p.read_bytes() for p in checkpoint.iterdir()}
    manifests = [run.origin(anchor=True, files=files)]
    for seed in range(7):
        manifests.append(run.step(seed, fraction=0.01))
        if manifests[-1].version in (2, 3):
            run.save(folder.parent / f"ckpt-{manifests[-1].version}", checkpoint)
        if manifests[-1].version == 5:
            run.save(folder.parent / "five", checkpoint)
            run.anchor(manifests[-1], {p.name: p.read_bytes() for p in (folder.parent / "five").iterdir()})
    for name, version in (("frankfurt-0", 8), ("frankfurt-1", 8), ("oregon-0", 8)):
        served = manifests[version - 1]
        nothing = dict.fromkeys(("refused_version", "refused_object", "error_kind", "error"))
        run.ledger.acknowledge(Ack(name, version, served.sha256, served.epoch, state="live", time=1.8e9, **nothing))
    return run


def damage(folder: Path) -> None:
    """Flip one bit of version 7's object; a replica refused it."""
    [path] = folder.glob("deltas/000000000007-*")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    ledger = Ledger(open_store(str(folder)))
    said = {"state": "refused", "refused_version": 7, "error_kind": "IntegrityError", "error": "sha256 of object …"}
    ledger.acknowledge(dataclasses.replace(ledger.acknowledgements()["oregon-0"], version=6, **said))


def another_run(folder: Path) -> None:
    """A run of another trainer's in ``folder``."""
    Publisher(str(folder), {"w": np.zeros((2, 2), np.uint16)}).origin()


def checkpoints(here: World, *, delta: bool = False) -> None:
    """Versions 2 and 3 as checkpoints to work with, and what changed between them."""
    for name in ("ckpt-2", "ckpt-3"):
        shutil.copytree(here.made / name, here.folder / name)
    if delta:
        command = ["diff", "ckpt-2", "ckpt-3", "--out", "step.safetensors"]
        subprocess.run([sys.executable, "-m", "delta_sync.cli", *command], cwd=here.folder, check=True, timeout=120)


WORLDS = {
    "damage": lambda here: damage(here.run),
    "checkpoints ckpt-2 and ckpt-3": checkpoints,
    "checkpoints ckpt-2 and ckpt-3, step.safetensors between them": lambda here: checkpoints(here, delta=True),
    "another run in ./other": lambda here: another_run(here.folder / "other"),
}


def local(folder: Path, run: Path) -> World:
    """A world of folders: a copy of the run, an empty disk, keys."""
    shutil.copytree(run, folder / "run")
    (folder / "work").mkdir()
    names = {
        "/mnt/run": str(folder / "run"),
        "/disk/run": str(folder / "disk" / "run"),
        "/var/cache/delta-sync": str(folder / "cache"),
    }
    return World(folder / "work", run.parent, names)
