"""The same changes in every codec of ours and every peer's layout: how many bytes, and how fast."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from delta_sync.checkpoint import Checkpoint
from delta_sync.cli.report import Table, bar, percent, size
from delta_sync.errors import FormatError, IntegrityError
from delta_sync.peer_layouts import LAYOUTS, Changed, Layout, changed_elements

NARROW = 2  # bytes an element, which is what the peers' layouts are described for


def changes_between(before: Checkpoint, after: Checkpoint) -> list[Changed]:
    """What changed in every tensor of two checkpoints with the same tensors."""
    found = []
    for name, kind, shape, old in before:
        found.append(changed_elements(name, shape, old, after[name][3], kind))
    return found


def sizes(changes: Sequence[Changed], repeats: int = 0) -> list[dict[str, Any]]:
    """A row for each layout; with ``repeats`` its speed too, the best of so many.

    Every layout is decoded and compared before its size counts. Only tensors of 16-bit elements.
    FormatError where nothing changed in those.
    """
    narrow = [c for c in changes if c.delta.dtype.itemsize == NARROW and c.delta.changed]
    if not narrow:
        raise FormatError("what to compare", expected="changed elements of 16 bits", got="none")
    changed = sum(c.delta.changed for c in narrow)
    dense = sum(NARROW * c.before.size for c in changes if c.delta.dtype.itemsize == NARROW)
    rows = [_row(layout, narrow, changed, dense, repeats) for layout in LAYOUTS]
    rows.append({"layout": "raw: every element", "bytes": dense, "bytes_per_changed_element": dense / changed})
    return rows


def _row(layout: Layout, changes: Sequence[Changed], changed: int, dense: int, repeats: int) -> dict[str, Any]:
    data = layout.encode(changes)
    _check(layout, data, changes)
    row: dict[str, Any] = {
        "layout": layout.name,
        "bytes": len(data),
        "bytes_per_changed_element": len(data) / changed,
    }
    if repeats:
        row["encode_bytes_per_second"] = dense / _fastest(lambda: _encode(layout, changes), repeats)
        row["decode_bytes_per_second"] = dense / _fastest(lambda: layout.decode(data, changes), repeats)
    return row


def _check(layout: Layout, data: bytes, changes: Sequence[Changed]) -> None:
    for c, (positions, bits) in zip(changes, layout.decode(data, changes), strict=True):
        if not (np.array_equal(positions, c.positions) and np.array_equal(bits, c.new)):
            raise IntegrityError(f"tensor {c.name!r} in layout {layout.name}", expected="what was encoded", got="other")


def _encode(layout: Layout, changes: Sequence[Changed]) -> bytes:
    """From old and new weights to bytes, so that all begin alike."""
    if not layout.finds:
        changes = [changed_elements(c.name, c.shape, c.before, c.after, c.delta.dtype) for c in changes]
    return layout.encode(changes)


def _fastest(run: Callable[[], object], repeats: int) -> float:
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return max(min(times), 1e-9)


def sizes_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows for a person; shares are of the first, TRL's."""
    trl = rows[0]["bytes"]
    columns = ["layout", ">bytes", ">per changed element", ">of TRL"]
    cells = [
        [row["layout"], size(row["bytes"]), f"{row['bytes_per_changed_element']:.3f}", percent(row["bytes"], trl)]
        for row in rows
    ]
    if "encode_bytes_per_second" in rows[0]:
        columns += [">encode", ">decode"]
        cells = [[*row, _speed(r, "encode"), _speed(r, "decode")] for row, r in zip(cells, rows, strict=True)]
    return Table("the same changes in every layout", columns, cells)


def left_out(changes: Sequence[Changed]) -> list[str]:
    """What the table is not about, if anything: of fp8 and float32 tensors there is nothing to compare with."""
    wide = sum(c.delta.changed for c in changes if c.delta.dtype.itemsize != NARROW)
    said = f"{wide:,} changed elements are not of 16 bits: no peer's layout is for those, they are left out"
    return [said] if wide else []


def _speed(row: dict[str, Any], what: str) -> str:
    found = row.get(f"{what}_bytes_per_second")
    return "-" if found is None else f"{found / 1e9:.2f} GB/s"


def most_changed(changes: Sequence[Changed], top: int) -> list[dict[str, Any]]:
    """The tensors of which the largest number of elements changed."""
    ordered = sorted((c for c in changes if c.delta.changed), key=lambda c: -c.delta.changed)[:top]
    return [
        {
            "name": c.name,
            "dtype": c.delta.dtype.name,
            "shape": list(c.shape),
            "encoding": c.delta.encoding,
            "changed_elements": c.delta.changed,
            "elements": c.before.size,
        }
        for c in ordered
    ]


def most_changed_table(rows: Sequence[dict[str, Any]]) -> Table:
    """The same for a person; a bar is a tensor's changed elements beside those of the first."""
    most = rows[0]["changed_elements"] if rows else 0
    cells = [
        [t["name"], t["dtype"], "x".join(map(str, t["shape"])), f"{t['changed_elements']:,}",
         percent(t["changed_elements"], t["elements"]), bar(t["changed_elements"], most)]
        for t in rows
    ]  # fmt: skip
    return Table("most changed tensors", ("tensor", "dtype", "shape", ">changed", ">%", ""), cells)
