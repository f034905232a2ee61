"""``delta-sync apply``: deltas applied to a checkpoint, as a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.checkpoint_out import write_checkpoint
from delta_sync.cli.diff import AFTER, BEFORE
from delta_sync.cli.report import FINE, AsJson, Report, finish, many, printable, size
from delta_sync.cli.run import PublicKey, checked_uri, local_path, open_ledger, split_version, version_of
from delta_sync.cli.weights import Weights, naming, read_delta, read_object_file
from delta_sync.container import read_container
from delta_sync.context_file import decode_against
from delta_sync.delta_header import DeltaHeader, from_metadata
from delta_sync.digest import state_digest
from delta_sync.errors import ChainError, IntegrityError
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.store.open import redact_uri
from delta_sync.tensor_delta import TensorDelta


def apply(
    base: Annotated[Path, typer.Argument(metavar="BASE_CKPT", help="A checkpoint's folder, or a safetensors file.")],
    paths: Annotated[
        list[str], typer.Argument(metavar="DELTA... DIR", help="Files or URI@VERSION, oldest first; then where to.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Apply and prove in memory, and write nothing.")] = False,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Apply deltas to a checkpoint and write the outcome to DIR, which must not exist: whole and proven, or not at all.

    Proven by digest where the digests are known: of files that delta-sync diff made, and of a run's versions. Holds one
    model in memory. Exits with 1 if BASE_CKPT is not what the first delta changes.
    """
    if len(paths) < 2:
        raise typer.BadParameter("name at least one delta, and the folder to write", param_hint="DELTA... DIR")
    *deltas, folder = paths
    if os.path.lexists(folder):
        raise typer.BadParameter(f"{folder} exists: name a folder that does not", param_hint="DIR")
    for source in deltas:
        uri, version = split_version(source)
        if _is_file(source):
            continue
        if version is None:
            got = printable(redact_uri(source))
            raise typer.BadParameter(
                f"expected a file, or a version of a run as URI@VERSION, got {got}", param_hint="DELTA"
            )
        checked_uri(uri)
    finish(as_json, lambda: _report(base, deltas, Path(folder), public_key, dry_run=dry_run))


@dataclass(frozen=True)
class _Step:
    """One delta as given: what it says of itself, and the state digests before and after where they are known."""

    source: str
    header: DeltaHeader
    deltas: list[TensorDelta]
    before: str | None
    after: str | None


def _report(base: Path, sources: Sequence[str], folder: Path, keys: list[str] | None, *, dry_run: bool) -> Report:
    checkpoint = Checkpoint(base)
    weights = Weights(checkpoint)
    applied, last = 0, None
    for source in sources:
        step = _of_file(Path(source), weights) if _is_file(source) else _of_run(source, weights, keys)
        _check_order(last, step)
        _advance(weights, step)
        applied, last = applied + sum(delta.changed for delta in step.deltas), step
    proven, digest = last is not None and last.after is not None, state_digest(weights.states)
    names = [] if dry_run else write_checkpoint(folder, weights, digest, checkpoint.others().items())
    total = sum((folder / name).stat().st_size for name in names)
    document: dict[str, object] = {
        "base": str(base),
        "deltas": list(sources),
        "changed_elements": applied,
        "state_digest": digest,
        "proven": proven,
        "written": not dry_run,
        "folder": str(folder),
        "files": names,
        "bytes": total,
    }
    done = f"{many(len(sources), 'delta')}, {many(applied, 'change')}: state digest {digest[:16]}"
    where = "nothing written" if dry_run else f"{folder}: {many(len(names), 'file')}, {size(total)}"
    doubt = "not proven: the last delta does not say which weights it leads to; name it as URI@VERSION if you can"
    return Report(document, [f"{done}{' proven' if proven else ''}", where], FINE, [] if proven else [doubt])


def _is_file(source: str) -> bool:
    return (path := local_path(source)) is not None and path.is_file()


def _of_run(source: str, weights: Weights, keys: list[str] | None) -> _Step:
    """A version of a run; ChainError if it does not change ``weights``."""
    uri, version = split_version(source)
    ledger = open_ledger(uri, keys)
    manifest = version_of(ledger, version)
    parent = ledger.parent(manifest) if manifest.kind == "delta" else None
    if parent is None:
        remedy = "delta-sync materialize writes any version"
        raise ChainError(f"version {version}", expected="a delta", got=manifest.kind, remedy=remedy)
    _check_base(source, parent.state_digest, weights)
    deltas = [delta for ref in manifest.objects for delta in read_delta(ledger, manifest, ref, weights)[2]]
    header = DeltaHeader(manifest.run, manifest.version, parent.version, manifest.codec or "")
    return _Step(source, header, deltas, parent.state_digest, manifest.state_digest)


def _of_file(path: Path, weights: Weights) -> _Step:
    """A delta object; ChainError if it says that it does not change ``weights``."""
    data = read_object_file(path)
    with naming(str(path), "name deltas, then the folder to write"):
        extra = from_metadata(read_container(data, DEFAULT_LIMITS)[0], DEFAULT_LIMITS)[0].extra
        if before := extra.get(BEFORE):  # before it is decoded: what is coded against other bits is not even readable
            _check_base(str(path), before, weights)
        return _Step(str(path), *decode_against(data, weights.base), extra.get(BEFORE), extra.get(AFTER))


def _check_base(source: str, before: str, weights: Weights) -> None:
    if (got := state_digest(weights.states)) != before:
        remedy = "name the checkpoint that this delta was made from, or the deltas in between"
        raise ChainError(f"base of {source}", expected=f"state digest {before}", got=got, remedy=remedy)


def _check_order(last: _Step | None, step: _Step) -> None:
    """Deltas of one run that don't follow each other are refused even where no digest says so."""
    if last is None or last.header.run != step.header.run or step.before is not None:
        return
    here, there = last.header, step.header
    same = (there.version, there.base_version) == (here.version, here.base_version)  # a version of several objects
    if there.base_version != here.version and not same:
        raise ChainError(f"base version of {step.source}", expected=here.version, got=there.base_version)


def _advance(weights: Weights, step: _Step) -> None:
    weights.change(step.deltas, step.source)
    if step.after is not None and (got := state_digest(weights.states)) != step.after:
        remedy = "the delta is not what was published, or was made from other weights"
        raise IntegrityError(f"state digest after {step.source}", expected=step.after, got=got, remedy=remedy)
