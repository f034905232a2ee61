"""Weights as a plain Hugging Face checkpoint on the disk: whole and proven, or not there at all."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Iterable, Mapping
from pathlib import Path

from delta_sync.anchor_files import write_anchor_files
from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.weights import Weights
from delta_sync.digest import state_digest
from delta_sync.errors import IntegrityError


def write_checkpoint(
    folder: Path, weights: Weights, digest: str, others: Iterable[tuple[str, bytes | Path]] = ()
) -> list[str]:
    """Write weights of that state digest beside ``others`` (name, content); the names of all files.

    What was written is read again; IntegrityError if it has another digest. ``folder`` must not exist.
    """
    partial = _partial(folder)
    try:
        names = [*write_anchor_files(partial, weights.tensors())]
        got = state_digest(Weights(Checkpoint(partial), keep=False).states)
        if got != digest:
            raise IntegrityError(f"state digest of what was written to {folder}", expected=digest, got=got)
        for name, content in others:
            path = partial / name  # inside it: neither a key nor a path below a folder has a ".."
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            else:
                shutil.copyfile(content, path)
            names.append(name)
        partial.rename(folder)
    except OSError as error:
        if error.filename:
            raise
        raise OSError(error.errno, error.strerror, str(folder)) from error  # a write does not know to what
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(names)


def write_folder(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files (name -> content) into a folder that must not exist: all of them, or there is none."""
    partial = _partial(folder)
    try:
        partial.mkdir(parents=True)
        for name, content in files.items():
            (partial / name).write_bytes(content)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _partial(folder: Path) -> Path:
    return folder.absolute().parent / f".{folder.name}.partial-{uuid.uuid4().hex[:8]}"
