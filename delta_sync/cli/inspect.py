"""``delta-sync inspect``: what a delta consists of, and where the model changes."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import typer

from delta_sync.adapter import read_adapter
from delta_sync.bitmap import Bits
from delta_sync.checkpoint import Checkpoint, is_checkpoint
from delta_sync.cli.compare import most_changed_table
from delta_sync.cli.dashboard.heat import layer_of
from delta_sync.cli.inspect_weights import is_delta, report_adapter, report_weights
from delta_sync.cli.report import AsJson, Report, Table, bar, finish, many, percent, size
from delta_sync.cli.run import checked_uri, local_path, open_ledger, split_version, version_of
from delta_sync.cli.weights import Weights, naming, no_base, read_delta, read_object_file, rebuild
from delta_sync.container import read_container
from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import decode_against
from delta_sync.delta_file import DeltaHeader
from delta_sync.dtypes import dtype
from delta_sync.ledger import Ledger
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.tensor_delta import TensorDelta


def inspect(
    what: Annotated[
        str, typer.Argument(metavar="FILE|CKPT|URI[@VERSION]", help="A delta, a checkpoint, or a version.")
    ],
    top: Annotated[int, typer.Option(min=1, help="How many of the most changed tensors and layers to show.")] = 10,
    base: Annotated[
        Path | None, typer.Option(metavar="CKPT", help="The weights that FILE changes, if it is coded against them.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Header, tensors, gaps, ULP steps and where the model changes; the newest version if none is named.

    Of complete weights (a checkpoint's folder or file, an origin, an anchor) the tensors. A version that is coded
    against the old bits is decoded against them, which reads an anchor.
    """
    path = local_path(what)
    if path is not None and (path.is_file() or is_checkpoint(path)):
        finish(as_json, lambda: _of_path(path, base, top))
    uri, version = split_version(what)
    finish(as_json, lambda: _of_version(open_ledger(checked_uri(uri)), version, top))


Object = tuple[str, bytes, DeltaHeader, list[TensorDelta]]


def _of_path(path: Path, base: Path | None, top: int) -> Report:
    with naming(str(path), "name a delta, a checkpoint or URI@VERSION"):
        if path.is_dir() or not is_delta(path):
            return report_weights(str(path), ((name, *head[1:]) for name, head in Checkpoint(path).heads.items()))
        data = read_object_file(path)
        bits = no_base if base is None else Weights(Checkpoint(base)).base
        return _report(str(path), [(str(path), data, *decode_against(data, bits))], top)


def _of_version(ledger: Ledger, version: int | None, top: int) -> Report:
    manifest = version_of(ledger, version)
    what = f"{ledger.store.uri}@{manifest.version}"
    if manifest.kind == "adapter":
        return report_adapter(what, manifest, read_adapter(ledger, manifest).config)
    if not manifest.objects:
        heads = ((name, dtype(state.dtype), state.shape) for name, state in manifest.tensors.items())
        return report_weights(what, heads, manifest, ledger.anchor(manifest))
    before = None
    if manifest.codec == CONTEXT_CODEC:
        before = rebuild(ledger, ledger.parent(manifest) or manifest)[1]
    return _report(what, [(ref.key, *read_delta(ledger, manifest, ref, before)) for ref in manifest.objects], top)


def _report(what: str, objects: Sequence[Object], top: int) -> Report:
    deltas = _whole(objects)
    changed, total = sum(delta.changed for delta in deltas), sum(len(data) for _, data, *_ in objects)
    gaps, ups, downs = Counter[int](), Counter[int](), Counter[int]()
    for delta in deltas:
        gaps += _powers(np.diff(delta.positions, prepend=-1) - 1)
        if delta.encoding == "ulp":
            up, down = _sizes(delta.values)
            ups += _powers(up)
            downs += _powers(down)
    streams = _streams(objects)
    most = sorted(deltas, key=lambda delta: -delta.changed)[:top]
    document: dict[str, Any] = {
        "what": what,
        "objects": [_object(*found) for found in objects],
        "tensors": len({delta.name for delta in deltas}),
        "changed_elements": changed,
        "bytes": total,
        "bytes_per_changed_element": total / changed if changed else None,
        "streams": streams,
        "gaps": [{"from": low, "to": high, "count": gaps[k]} for k, low, high in _ranges(gaps)],
        "steps": [{"from": low, "to": high, "up": ups[k], "down": downs[k]} for k, low, high in _ranges(ups | downs)],
        "raw_elements": sum(delta.changed for delta in deltas if delta.encoding == "raw"),
        "top": [_tensor(delta) for delta in most],
        "top_layers": _layers(deltas)[:top],
    }
    return Report(document, _parts(document))


def _object(key: str, data: bytes, header: DeltaHeader, deltas: Sequence[TensorDelta]) -> dict[str, object]:
    return {"key": key, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest(), **vars(header)}


def _whole(objects: Sequence[Object]) -> list[TensorDelta]:
    """All changes, one delta a tensor and encoding: a trainer's ranks each write what they hold of a tensor."""
    parts: dict[tuple[str, str], list[TensorDelta]] = {}
    for delta in (delta for *_, found in objects for delta in found):
        parts.setdefault((delta.name, delta.encoding), []).append(delta)
    return [_joined(of_one) for of_one in parts.values()]


def _joined(parts: Sequence[TensorDelta]) -> TensorDelta:
    if len(parts) == 1:
        return parts[0]
    positions = np.concatenate([part.positions for part in parts])
    order = np.argsort(positions, kind="stable")
    values = np.concatenate([part.values for part in parts])
    return replace(parts[0], positions=positions[order], values=values[order])


def _tensor(delta: TensorDelta) -> dict[str, object]:
    return {
        "name": delta.name,
        "dtype": delta.dtype.name,
        "shape": list(delta.shape),
        "encoding": delta.encoding,
        "changed_elements": delta.changed,
        "elements": math.prod(delta.shape),
    }


def _layers(deltas: Sequence[TensorDelta]) -> list[dict[str, Any]]:
    """Tensors by layer, the one with the most changed elements first."""
    found: dict[str, dict[str, Any]] = {}
    counted: set[str] = set()  # a tensor may have steps and raw bits
    for delta in deltas:
        name = layer_of(delta.name)
        row = found.setdefault(name, {"layer": name, "changed_elements": 0, "elements": 0})
        row["changed_elements"] += delta.changed
        if delta.name not in counted:
            row["elements"] += math.prod(delta.shape)
            counted.add(delta.name)
    return sorted(found.values(), key=lambda row: -int(row["changed_elements"]))


def _streams(objects: Sequence[Object]) -> dict[str, int]:
    """Bytes by kind of stream, and what is left for headers."""
    found = Counter[str]()
    for _, data, *_ in objects:
        streams = read_container(data, DEFAULT_LIMITS)[1]
        for name, stream in streams.items():
            found[name.partition(".")[2]] += len(stream)
        found["header"] += len(data) - sum(map(len, streams.values()))
    return dict(found)


def _sizes(steps: Bits) -> tuple[Bits, Bits]:
    """ULP steps modulo 2**width as sizes of those upwards and of those downwards."""
    down = steps >> np.array(8 * steps.itemsize - 1, steps.dtype) != 0
    return steps[~down], (~steps[down] + np.array(1, steps.dtype)).astype(steps.dtype)


def _powers(values: npt.NDArray[Any]) -> Counter[int]:
    """How many values have k bits: 0 is none, 1 has one, 2 and 3 have two, 4 to 7 have three."""
    bits = np.frexp(values.astype(np.float64))[1]
    return Counter({int(k): int(count) for k, count in zip(*np.unique(bits, return_counts=True), strict=True)})


def _ranges(counts: Counter[int]) -> list[tuple[int, int, int]]:
    """(k, lowest, highest) value of k bits, for every k up to the greatest that occurs."""
    if not counts:
        return []
    return [(k, 2 ** (k - 1) if k else 0, 2**k - 1) for k in range(min(counts), max(counts) + 1)]


def _parts(document: dict[str, Any]) -> list[Table | str]:
    changed, total = document["changed_elements"], document["bytes"]
    each = "" if not changed else f", {total / changed:.2f} bytes a changed element"
    parts: list[Table | str] = [f"{document['what']}: {many(document['tensors'], 'tensor')}, {changed:,} changed{each}"]
    columns = ("object", ">version", ">base", "codec", ">bytes", "sha256")
    rows = [
        [o["key"], o["version"], o["base_version"], o["codec"], size(o["bytes"]), o["sha256"][:16]]
        for o in document["objects"]
    ]
    parts.append(Table(f"objects of run {document['objects'][0]['run']}", columns, rows))
    streams = [
        [name, size(count), f"{count / changed:.3f}" if changed else "-"] for name, count in document["streams"].items()
    ]
    parts.append(Table("streams", ("stream", ">bytes", ">per changed element"), streams))
    most = max((row["count"] for row in document["gaps"]), default=0)
    gaps = [
        [_range(row), f"{row['count']:,}", percent(row["count"], changed), bar(row["count"], most)]
        for row in document["gaps"]
    ]
    parts.append(Table("gaps: unchanged elements before a changed one", (">gap", ">count", ">share", ""), gaps))
    stepped = changed - document["raw_elements"]
    most = max((row["up"] + row["down"] for row in document["steps"]), default=0)
    steps = [
        [_range(row), f"{row['up']:,}", f"{row['down']:,}", percent(row["up"] + row["down"], stepped),
         bar(row["up"] + row["down"], most)]
        for row in document["steps"]
    ]  # fmt: skip
    parts.append(Table("ULP steps", (">size", ">up", ">down", ">share", ""), steps))
    if document["raw_elements"]:
        parts.append(f"{document['raw_elements']:,} elements as raw bits")
    layers, most = document["top_layers"], max((row["changed_elements"] for row in document["top_layers"]), default=0)
    rows = [
        [row["layer"], f"{row['changed_elements']:,}", percent(row["changed_elements"], row["elements"]),
         bar(row["changed_elements"], most)]
        for row in layers
    ]  # fmt: skip
    parts.append(Table("most changed layers", ("layer", ">changed", ">%", ""), rows))
    parts.append(most_changed_table(document["top"]))
    return parts


def _range(row: dict[str, int]) -> str:
    return str(row["from"]) if row["from"] == row["to"] else f"{row['from']}-{row['to']}"
