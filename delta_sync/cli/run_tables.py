"""A run's rows as tables for people: what ``ledger`` prints once and ``watch`` keeps drawing."""

from __future__ import annotations

import math
from collections.abc import Sequence

from delta_sync.cli.report import Table, age, duration, percent, size
from delta_sync.cli.view import Row

_TIMES = {
    "noticed": "noticed_seconds",
    "staged": "stage_seconds",
    "committed": "commit_seconds",
    "served": "served_seconds",
    "gap": "gap_seconds",
}
SILENT_SECONDS = 600.0  # in which a replica that runs takes a newer version, or says why not


def versions_table(versions: Sequence[Row], now: float) -> Table:
    """Versions in the given order; who signed them, where anybody did."""
    columns = [">version", "kind", ">epoch", ">steps", ">age", ">changed", ">%", ">bytes", "parent", "anchor"]
    rows = [_version(row, now) for row in versions]
    if any(row["folds"] for row in versions):
        columns.append("folds from")
        rows = [[*cells, _folds(row)] for cells, row in zip(rows, versions, strict=True)]
    if any(row["signed_by"] for row in versions):
        columns.append("signed by")
        rows = [[*cells, row["signed_by"] or "-"] for cells, row in zip(rows, versions, strict=True)]
    return Table("versions", columns, rows)


def replicas_table(replicas: Sequence[Row], now: float) -> Table:
    """Replicas in the given order; how long their last commit took, where any of them says so."""
    times = _TIMES if any(row["performance"] for row in replicas) else {}
    columns = ["replica", "state", ">version", ">lag", ">heard", *(f">{name}" for name in times), "error"]
    return Table("replicas", columns, [_replica(row, now, list(times.values())) for row in replicas])


def steps(row: Row) -> str:
    """``7``, or ``7-9`` where a version covers several optimizer steps."""
    first, last = row["steps"]
    return str(first) if first == last else f"{first}-{last}"


def trouble(row: Row) -> str:
    """What is wrong with a replica, ``-`` if nothing is."""
    if row["error"] is None:
        return "serves a version that is none of this chain's" if row["on_chain"] is False else "-"
    refused = f"refused {row['refused_version']}: " if row["refused_version"] else ""
    return f"{refused}{row['error']}"


def silence(row: Row, now: float) -> float | None:
    """How long a replica has said nothing though there is a newer version, if that is long; it may be gone for good."""
    waited = now - max(row["time"], row["behind_since"] or -math.inf)
    return waited if row["state"] == "live" and row["lag"] and waited > SILENT_SECONDS else None


def _version(row: Row, now: float) -> list[object]:
    anchor = row["anchor"]
    return [
        row["version"],
        row["kind"],
        row["epoch"],
        steps(row),
        age(now - row["created_at"]),
        f"{row['changed_elements']:,}",
        percent(row["changed_elements"], row["total_elements"]),
        size(row["bytes"]),
        (row["parent"] or "-")[:8],
        "-" if anchor is None else "damaged" if "error" in anchor else size(anchor["bytes"]),
    ]


def _folds(row: Row) -> str:
    return ", ".join(map(str, row["folds"])) or "-"


def _replica(row: Row, now: float, times: Sequence[str]) -> list[object]:
    silent = silence(row, now)
    return [
        row["replica"],
        row["state"] if silent is None else f"silent for {age(silent)}",
        "-" if row["version"] is None else row["version"],
        "-" if row["lag"] is None else row["lag"],
        age(now - row["time"]),
        *(duration(row["performance"].get(name)) for name in times),
        trouble(row),
    ]
