"""What complete weights consist of: a checkpoint's file, an origin, an anchor."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from delta_sync.adapter import AdapterConfig
from delta_sync.anchor_files import Head
from delta_sync.cli.report import FINE, Report, Table, many, size
from delta_sync.container import parse_json
from delta_sync.delta_header import FORMAT
from delta_sync.dtypes import dtype
from delta_sync.errors import FormatError
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.manifest import AnchorRecord, Manifest


def is_delta(path: Path) -> bool:
    """Whether a file is to be read as a delta: it says so, or is no safetensors file at all. OSError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        text = file.read(min(length, DEFAULT_LIMITS.header_bytes))
    try:
        header = parse_json(text, str(path))
    except FormatError:
        return True  # the delta's reader says what is wrong with it
    metadata = header.get("__metadata__") if isinstance(header, dict) else None
    return isinstance(metadata, dict) and metadata.get("format") == FORMAT


def report_weights(
    what: str, heads: Iterable[Head], manifest: Manifest | None = None, anchor: AnchorRecord | None = None
) -> Report:
    """All tensors by name, and where they come from."""
    rows: list[dict[str, Any]] = [
        {
            "name": name,
            "dtype": kind.name,
            "shape": list(shape),
            "elements": math.prod(shape),
            "bytes": math.prod(shape) * kind.itemsize,
        }
        for name, kind, shape in sorted(heads)
    ]
    document: dict[str, Any] = {
        "what": what,
        "kind": "weights" if manifest is None else manifest.kind,
        "state_digest": None if manifest is None else manifest.state_digest,
        "tensors": len(rows),
        "elements": sum(row["elements"] for row in rows),
        "bytes": sum(row["bytes"] for row in rows),
        "dtypes": dict(Counter(row["dtype"] for row in rows)),
        "all": rows,
        "anchor": None if anchor is None else [vars(ref) for ref in anchor.objects],
    }
    kinds = ", ".join(f"{count} {kind}" for kind, count in document["dtypes"].items())
    head = f"{what}: {many(len(rows), 'tensor')} ({kinds or 'none'}), {document['elements']:,} elements"
    parts: list[Table | str] = [head]
    if manifest is not None:
        parts.append(f"{manifest.kind} of run {manifest.run}: no delta, state digest {manifest.state_digest[:16]}")
    if anchor is not None:
        files = [[ref.key.rpartition("/")[2], size(ref.size), ref.sha256[:16]] for ref in anchor.objects]
        parts.append(Table("anchor", ("file", ">bytes", "sha256"), files))
    cells = [[r["name"], r["dtype"], "x".join(map(str, r["shape"])), size(r["bytes"])] for r in rows]
    parts.append(Table("tensors", ("tensor", "dtype", "shape", ">bytes"), cells))
    return Report(document, parts, FINE)


def report_adapter(what: str, manifest: Manifest, config: AdapterConfig) -> Report:
    """An adapter's settings and tensors, which are those that its manifest promises."""
    heads = ((name, dtype(state.dtype), state.shape) for name, state in manifest.tensors.items())
    report = report_weights(what, heads)
    ref, count = manifest.objects[0], len(manifest.tensors) // 2
    document = {**report.document, "kind": "adapter", "adapter": config.to_peft(), "objects": [vars(ref)]}
    said = f"LoRA adapter of rank {config.r}, scaling {config.scaling:g}, on {many(count, 'module')}, {size(ref.size)}"
    below = f"over weights with state digest {manifest.state_digest[:16]}, which this version leaves as they are"
    return Report({**document, "state_digest": manifest.state_digest}, [said, below, *report.parts], FINE)
