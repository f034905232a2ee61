"""``delta-sync materialize``: one version as a plain Hugging Face checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from delta_sync.adapter import CONFIG, WEIGHTS, read_adapter
from delta_sync.anchor_files import INDEX
from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.checkpoint_out import write_checkpoint, write_folder
from delta_sync.cli.report import FINE, AsJson, Report, finish, many, size
from delta_sync.cli.run import PublicKey, checked_uri, open_ledger, split_version, version_of
from delta_sync.cli.weights import rebuild
from delta_sync.ledger import Ledger
from delta_sync.manifest import AnchorRecord, Manifest
from delta_sync.plan import Plan
from delta_sync.store.keys import anchor_folder


def materialize(
    what: Annotated[str, typer.Argument(metavar="URI[@VERSION]", help="A run, or one of its versions.")],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Where to; must not exist yet.")],
    base: Annotated[
        Path | None,
        typer.Option(metavar="CKPT", help="Weights of an older version, such as the model that the run began with."),
    ] = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Write a version's weights as a Hugging Face checkpoint, proven by digest before it is put in place.

    Of a version that is an adapter, a folder that PEFT loads over the base model.
    Starts from the nearest anchor below that is whole, or from CKPT if that is given, and applies the deltas behind it;
    holds one model and one file in memory. Config and tokenizer are the anchor's, or CKPT's.
    """
    uri, version = split_version(what)
    checked_uri(uri)
    if os.path.lexists(folder):
        raise typer.BadParameter(f"{folder} exists: name a folder that does not", param_hint="DIR")
    finish(as_json, lambda: _report(open_ledger(uri, public_key), version, folder, base))


def _report(ledger: Ledger, version: int | None, folder: Path, base: Path | None) -> Report:
    target = version_of(ledger, version)
    if target.kind == "adapter":
        return _adapter(ledger, target, folder)
    plan, names = write_version(ledger, target, folder, base)
    anchor, deltas = plan.anchor, len(plan.deltas)
    total = sum((folder / name).stat().st_size for name in names)
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "version": target.version,
        "anchor": anchor and anchor.version,
        "base": None if anchor else str(base),
        "deltas": deltas,
        "anchors_left_out": [str(error) for error in plan.damaged],
        "state_digest": target.state_digest,
        "folder": str(folder),
        "files": names,
        "bytes": total,
    }
    done = f"version {target.version} in {folder}: {many(len(names), 'file')}, {size(total)}"
    start = f"the anchor of version {anchor.version}" if anchor else str(base)
    how = f"from {start} and {many(deltas, 'delta')}; state digest {target.state_digest[:16]} proven"
    if "config.json" in names:
        return Report(document, [done, how], FINE)
    lacking = f"{start} has no config.json: put the model's config and tokenizer beside the weights"
    return Report(document, [done, how], FINE, [lacking])


def _adapter(ledger: Ledger, target: Manifest, folder: Path) -> Report:
    """An adapter's version is a folder for PEFT: the weights below it are those of the model that it was trained on."""
    adapter = read_adapter(ledger, target)
    files = {
        WEIGHTS: ledger.read_object(target.objects[0]),
        CONFIG: (json.dumps(adapter.config.to_peft(), indent=2, sort_keys=True) + "\n").encode(),
    }
    write_folder(folder, files)
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "version": target.version,
        "adapter": adapter.config.to_peft(),
        "base_state_digest": target.state_digest,
        "folder": str(folder),
        "files": sorted(files),
        "bytes": sum(map(len, files.values())),
    }
    base = adapter.config.base_model or "the model it was trained on"
    done = f"adapter of version {target.version} in {folder}: rank {adapter.config.r}, {many(len(files), 'file')}"
    how = f"PeftModel.from_pretrained({base}, {str(folder)!r}) loads it; base weights have state digest"
    return Report(document, [done, f"{how} {target.state_digest[:16]}"], FINE)


def write_version(ledger: Ledger, target: Manifest, folder: Path, base: Path | None = None) -> tuple[Plan, list[str]]:
    """Write a version's checkpoint; the plan that led to its weights, from an anchor or from ``base``, and the files.

    ChainError without either.
    """
    start = None if base is None else Checkpoint(base)
    plan, weights = rebuild(ledger, target, start)
    others = _others(ledger, plan.anchor) if plan.anchor else start.others().items() if start else ()
    return plan, write_checkpoint(folder, weights, target.state_digest, others)


def _others(ledger: Ledger, anchor: AnchorRecord) -> Iterator[tuple[str, bytes]]:
    """Config, tokenizer and whatever else belongs to the anchor's checkpoint: name below its folder, content."""
    for ref in anchor.objects:
        name = ref.key.removeprefix(anchor_folder(anchor.version, anchor.epoch))
        if not (name.endswith(".safetensors") or name == INDEX):
            yield name, ledger.read_object(ref)
