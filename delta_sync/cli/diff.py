"""``delta-sync diff``: the delta between two checkpoints, and what it costs in every layout."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from delta_sync.checkpoint import Checkpoint, check_same_heads
from delta_sync.cli.compare import changes_between, left_out, most_changed, most_changed_table, sizes, sizes_table
from delta_sync.cli.report import FINE, AsJson, Report, Table, finish, many, percent, size
from delta_sync.cli.weights import Weights
from delta_sync.context_file import encode_against
from delta_sync.delta_file import encode_delta
from delta_sync.delta_header import DeltaHeader
from delta_sync.digest import state_digest
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.peer_layouts import Changed

BEFORE, AFTER = "base_state_digest", "state_digest"  # what the file says of its two checkpoints, for apply
Codec = Literal["gap", "context"]


def diff(
    before: Annotated[Path, typer.Argument(metavar="CKPT_A", help="A checkpoint's folder, or a safetensors file.")],
    after: Annotated[Path, typer.Argument(metavar="CKPT_B", help="The same model later.")],
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the delta; must not exist yet.")] = None,
    codec: Annotated[Codec, typer.Option(help="What FILE is coded with.")] = "gap",
    top: Annotated[int, typer.Option(min=1, help="How many of the most changed tensors to show.")] = 10,
    as_json: AsJson = False,
) -> None:
    """What changed from A to B, and how many bytes that is in our codecs and the peers' layouts.

    FILE takes A to B with delta-sync apply. Weights are mapped, not read into memory; what changed is held there.
    """
    if out is not None and os.path.lexists(out):
        raise typer.BadParameter(f"{out} exists: name a file that does not", param_hint="--out")
    finish(as_json, lambda: _report(before, after, out, codec, top))


def _report(before: Path, after: Path, out: Path | None, codec: Codec, top: int) -> Report:
    a, b = Checkpoint(before), Checkpoint(after)
    check_same_heads(a, b)
    changes = changes_between(a, b)
    changed = sum(c.delta.changed for c in changes)
    rows = sizes(changes) if any(c.delta.changed for c in changes if c.delta.dtype.itemsize == 2) else []
    document: dict[str, Any] = {
        "before": str(before),
        "after": str(after),
        "tensors": len(changes),
        "changed_tensors": sum(c.delta.changed > 0 for c in changes),
        "elements": a.elements,
        "changed_elements": changed,
        "layouts": rows,
        "top": most_changed(changes, top),
        "file": None if out is None else _write(out, a, b, changes, codec),
    }
    return Report(document, _parts(document, changes), FINE)


def _write(out: Path, a: Checkpoint, b: Checkpoint, changes: Sequence[Changed], codec: Codec) -> dict[str, object]:
    digests = {name: state_digest(Weights(ckpt, keep=False).states) for name, ckpt in ((BEFORE, a), (AFTER, b))}
    header = DeltaHeader("diff", 2, 1, DEFAULT_CODEC, digests)
    touched = [c for c in changes if c.delta.changed]
    if codec == "context":
        header, data, _ = encode_against(header, [c.whole for c in touched])
    else:
        data = encode_delta(header, [c.delta for c in touched])
    partial = out.with_name(f".{out.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(data)
        partial.rename(out)
    finally:
        partial.unlink(missing_ok=True)
    return {"path": str(out), "bytes": len(data), "codec": header.codec, **digests}


def _parts(document: dict[str, Any], changes: Sequence[Changed]) -> list[Table | str]:
    changed, elements = document["changed_elements"], document["elements"]
    share = f"{changed:,} of {elements:,} elements changed, {percent(changed, elements)}"
    parts: list[Table | str] = [f"{many(document['changed_tensors'], 'tensor')} of {document['tensors']:,}: {share}"]
    if document["layouts"]:
        parts.append(sizes_table(document["layouts"]))
    parts += left_out(changes)
    if document["top"]:
        parts.append(most_changed_table(document["top"]))
    if document["file"]:
        file = document["file"]
        parts.append(f"{file['path']}: {size(file['bytes'])}, {file['codec']}")
    return parts
