"""``delta-sync materialize``: one version as a plain Hugging Face checkpoint."""

from __future__ import annotations

import os
import shutil
import uuid
from pathlib import Path
from typing import Annotated

import typer

from delta_sync.anchor_files import INDEX, parse_shard, write_anchor_files
from delta_sync.cli.report import FINE, AsJson, Report, finish, many, size
from delta_sync.cli.run import PublicKey, checked_uri, open_ledger, split_version, version_of
from delta_sync.cli.weights import Weights, rebuild
from delta_sync.errors import ChainError
from delta_sync.ledger import Ledger
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.store.keys import anchor_folder


def materialize(
    what: Annotated[str, typer.Argument(metavar="URI[@VERSION]", help="A run, or one of its versions.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; must not exist yet.")],
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Write a version's weights as a Hugging Face checkpoint, proven by digest before it is put in place.

    Starts from the nearest anchor below and applies the deltas behind it; holds one model and one file in memory.
    Config and tokenizer are the anchor's.
    """
    uri, version = split_version(what)
    checked_uri(uri)
    if os.path.lexists(folder):
        raise typer.BadParameter(f"{folder} exists: name a folder that does not", param_hint="DIR")
    finish(as_json, lambda: _report(open_ledger(uri, public_key), version, folder))


def _report(ledger: Ledger, version: int | None, folder: Path) -> Report:
    target = version_of(ledger, version)
    plan, weights = rebuild(ledger, target)
    if plan.anchor is None:
        raise ChainError(f"version {target.version}", expected="an anchor at or below it", got="none")
    names = _write(ledger, weights, plan.anchor, target, folder)
    total = sum((folder / name).stat().st_size for name in names)
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "version": target.version,
        "anchor": plan.anchor.version,
        "deltas": len(plan.deltas),
        "state_digest": target.state_digest,
        "folder": str(folder),
        "files": names,
        "bytes": total,
    }
    done = f"version {target.version} in {folder}: {many(len(names), 'file')}, {size(total)}"
    start = f"from the anchor of version {plan.anchor.version} and {many(len(plan.deltas), 'delta')}"
    how = f"{start}; state digest {target.state_digest[:16]} proven"
    if "config.json" in names:
        return Report(document, [done, how], FINE)
    lacking = "the anchor has no config.json: put the model's config and tokenizer beside the weights"
    return Report(document, [done, how], FINE, [lacking])


def _write(ledger: Ledger, weights: Weights, anchor: AnchorRecord, target: Manifest, folder: Path) -> list[str]:
    """The names of the checkpoint's files; the folder appears whole, or not at all."""
    partial = folder.absolute().parent / f".{folder.name}.partial-{uuid.uuid4().hex[:8]}"
    try:
        names = [*write_anchor_files(partial, weights.tensors())]
        _prove(ledger, partial, names, target)
        names += _copy_others(ledger, anchor, partial)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return sorted(names)


def _prove(ledger: Ledger, folder: Path, names: list[str], target: Manifest) -> None:
    """IntegrityError unless what lies on the disk is the version's weights."""
    shards = (folder / name for name in names if name.endswith(".safetensors"))
    tensors = (tensor for path in shards for tensor in parse_shard(path.read_bytes(), path.name, ledger.limits))
    Weights(tensors, keep=False).prove(target)


def _copy_others(ledger: Ledger, anchor: AnchorRecord, folder: Path) -> list[str]:
    """Config, tokenizer and whatever else belongs to the anchor's checkpoint."""
    names = []
    for ref in anchor.objects:
        name = ref.key.removeprefix(anchor_folder(anchor.version, anchor.epoch))
        if name.endswith(".safetensors") or name == INDEX:
            continue
        path = folder / name  # inside it: a key has no "..", and begins with the anchor's folder
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(ledger.read_object(ref))
        names.append(name)
    return names
