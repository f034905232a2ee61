"""``delta-sync compact``: old deltas folded into one, so that a late replica fetches less."""

from __future__ import annotations

import uuid
from typing import Annotated

import typer

from delta_sync.cli.report import FINE, AsJson, Report, finish, many, size
from delta_sync.cli.run import PublicKey, checked_run, open_ledger, read_signing_key, version_of
from delta_sync.cli.weights import Weights, read_delta, rebuild
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.delta import fold
from delta_sync.errors import ChainError
from delta_sync.fold_writer import attach_fold
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import FoldRecord, Manifest, TensorState
from delta_sync.planner import downwards
from delta_sync.store.memory import MemoryStore
from delta_sync.tensor_delta import TensorDelta

Path = list[Manifest]  # oldest first, without the base


def compact(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    start: Annotated[
        int | None, typer.Option("--from", min=1, metavar="U", help="Base version; else the newest anchor's below V.")
    ] = None,
    end: Annotated[int | None, typer.Option("--to", min=1, metavar="V", help="Version; else the newest.")] = None,
    public_key: PublicKey = None,
    signing_key: Annotated[
        str | None,
        typer.Option("--signing-key", metavar="PATH", help="Sign the fold, for replicas that pin public keys."),
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Fold and say the outcome, and write nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Fold the deltas from version U to version V into one and attach it to V; nothing else is changed.

    Readers that are at U, or begin at U's anchor, take it where it is smaller, and prove the outcome. Holds the folded
    changes in memory, and one model where deltas are coded against the old bits.
    """
    finish(as_json, lambda: _report(open_ledger(uri, public_key), start, end, signing_key, dry_run=dry_run))


def _report(ledger: Ledger, start: int | None, end: int | None, signing_key: str | None, *, dry_run: bool) -> Report:
    key = read_signing_key(signing_key)
    base, path = _path(ledger, start, end)
    deltas, states = _folded(ledger, base, path)
    store = MemoryStore(uuid.uuid4().hex) if dry_run else ledger.store
    return _said(ledger, attach_fold(store, base, path[-1], deltas, states, key), path, dry_run=dry_run)


def _path(ledger: Ledger, start: int | None, end: int | None) -> tuple[Manifest, Path]:
    """The base and the versions after it; ChainError unless deltas lead from the one to the other, two at least."""
    target = version_of(ledger, end)
    anchored = set(ledger.anchors()) if start is None else set()
    walked: Path = []
    for manifest in downwards(ledger, target, []):
        far_enough = sum(each.kind == "delta" for each in walked) >= 2
        found = manifest.version == start or AnchorRef(manifest.version, manifest.epoch) in anchored
        if found and far_enough:
            return manifest, walked[::-1]
        walked.append(manifest)
    expected = "an anchor" if start is None else f"version {start}"
    raise ChainError(
        f"deltas to version {target.version}",
        expected=f"two or more, from {expected}",
        got=f"a chain from version {walked[-1].version}",
        remedy="name versions with --from and --to that only deltas lie between: delta-sync ledger shows them",
    )


def _folded(ledger: Ledger, base: Manifest, path: Path) -> tuple[list[TensorDelta], dict[str, TensorState]]:
    """One change a tensor and encoding, and the states after; what is coded against old bits needs them."""
    plain = all(manifest.codec != CONTEXT_CODEC for manifest in path)
    weights: Weights | None = None if plain else rebuild(ledger, base)[1]
    folded: dict[str, list[TensorDelta]] = {}
    states: dict[str, TensorState] = {}
    for manifest in path:
        refs = manifest.objects if manifest.kind == "delta" else ()
        objects = [read_delta(ledger, manifest, ref, weights)[2] for ref in refs]
        if weights is not None:
            weights.advance(manifest, objects)
        for delta in (delta for deltas in objects for delta in deltas):
            folded[delta.name] = fold([*folded.get(delta.name, ()), delta])
        if manifest.kind == "delta":
            states |= manifest.tensors
    return [delta for deltas in folded.values() for delta in deltas], states


def _said(ledger: Ledger, record: FoldRecord, path: Path, *, dry_run: bool) -> Report:
    folded = [manifest for manifest in path if manifest.kind == "delta"]
    count, before = len(folded), sum(ref.size for manifest in folded for ref in manifest.objects)
    after = sum(ref.size for ref in record.objects)
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "from": record.base_version,
        "to": record.version,
        "deltas": count,
        "bytes_before": before,
        "bytes": after,
        "written": not dry_run,
        "objects": [ref.key for ref in record.objects],
    }
    done = f"version {record.base_version} to {record.version}: {many(count, 'delta')} of {size(before)}"
    said = [f"{'would fold ' if dry_run else ''}{done} as one of {size(after)}"]
    if after > before:
        said.append("no smaller than the deltas: readers will go on taking those")
    return Report(document, [*said, *_left_out(path[-1], record)], FINE)


def _left_out(manifest: Manifest, record: FoldRecord) -> list[str]:
    """Why replicas that pin the run's key leave a fold out, if they do."""
    wanted, got = manifest.signature, record.signature
    if wanted is None or (got is not None and got.key == wanted.key):
        return []
    other = "not signed, as the run is" if got is None else f"not signed with the run's key {wanted.key}"
    return [f"{other}: replicas that pin keys leave it out; give --signing-key"]
