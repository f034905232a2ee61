"""``delta-sync bench``: bytes and speed of every layout on your own weights."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from delta_sync.checkpoint import Checkpoint, check_same_heads
from delta_sync.cli.compare import changes_between, left_out, sizes, sizes_table
from delta_sync.cli.report import FINE, AsJson, Report, Table, finish, percent
from delta_sync.cli.run import PublicKey, checked_uri, open_ledger, split_version, version_of
from delta_sync.cli.weights import Weights, read_delta, rebuild
from delta_sync.dtypes import dtype
from delta_sync.errors import ChainError
from delta_sync.ledger import Ledger
from delta_sync.peer_layouts import Changed, changed_elements


def bench(
    what: Annotated[
        list[str], typer.Argument(metavar="CKPT_A CKPT_B | URI[@VERSION]", help="Two checkpoints, or a delta of a run.")
    ],
    repeats: Annotated[int, typer.Option(min=1, help="Times that each is run; the fastest counts.")] = 3,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Bytes a changed element and encode and decode speed, of our codecs and the peers' layouts.

    Encode is from old and new weights to bytes, decode from bytes to positions and bits; GB/s are of dense weights.
    Each is decoded and compared before it counts. Of a run a version is taken, which holds two models in memory.
    """
    if len(what) > 2:
        raise typer.BadParameter("two checkpoints, or one version of a run", param_hint="CKPT_A CKPT_B")
    if len(what) == 2:
        finish(as_json, lambda: _report(" to ".join(what), _of_checkpoints(*map(Path, what)), repeats))
    uri, version = split_version(what[0])
    checked_uri(uri)
    finish(as_json, lambda: _report(what[0], _of_run(open_ledger(uri, public_key), version), repeats))


def _of_checkpoints(before: Path, after: Path) -> list[Changed]:
    one, other = Checkpoint(before), Checkpoint(after)
    check_same_heads(one, other)
    return changes_between(one, other)


def _of_run(ledger: Ledger, version: int | None) -> list[Changed]:
    """A version's changes; the newest that changed something if none is named."""
    manifest = version_of(ledger, version)
    while version is None and not manifest.changed_elements and (parent := ledger.parent(manifest)) is not None:
        manifest = parent
    base = ledger.parent(manifest) if manifest.kind == "delta" else None
    if base is None:
        raise ChainError(f"version {manifest.version}", expected="a delta", got=manifest.kind)
    weights = rebuild(ledger, base)[1]
    old = {name: bits.copy() for name, bits in weights.bits.items()}
    weights.advance(manifest, [read_delta(ledger, manifest, ref, weights)[2] for ref in manifest.objects])
    return [_changed(weights, name, old[name]) for name in sorted(old)]


def _changed(weights: Weights, name: str, old: Any) -> Changed:
    state = weights.states[name]
    return changed_elements(name, state.shape, old, weights.bits[name], dtype(state.dtype))


def _report(what: str, changes: Sequence[Changed], repeats: int) -> Report:
    rows = sizes(changes, repeats)
    changed, elements = sum(c.delta.changed for c in changes), sum(c.before.size for c in changes)
    machine = {"cpu": _cpu(), "cores": os.cpu_count()}
    document: dict[str, object] = {
        "what": what,
        "machine": machine,
        "repeats": repeats,
        "elements": elements,
        "changed_elements": changed,
        "layouts": rows,
    }
    parts: list[Table | str] = [
        f"{what}: {changed:,} of {elements:,} elements changed, {percent(changed, elements)}",
        f"{machine['cpu']}, {machine['cores']} cores; the fastest of {repeats}, speeds are of dense weights",
        sizes_table(rows),
        *left_out(changes),
    ]
    return Report(document, parts, FINE)


def _cpu() -> str:
    """The processor's name, as figures are worth nothing without."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()
