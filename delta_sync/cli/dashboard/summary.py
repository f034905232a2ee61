"""What the page shows of a run, as JSON of bounded size however long the run is."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from delta_sync.cli.dashboard.heat import COLUMNS, HeatMap, sample, stride
from delta_sync.cli.dashboard.times import CommitTimes
from delta_sync.cli.view import Row

POINTS = 240  # that a chart has at most
NEWEST = 12  # versions in the table
REPLICAS = 500
ERROR_CHARACTERS = 600
_LARGEST = 1e300
WINDOWS = {"all": None, "1000": 1000, "200": 200, "50": 50}  # how many of the newest versions charts show
_BY_NEED = ("poisoned", "refused", "astray", "behind", "starting", "current")
_SHOWN = ("version", "epoch", "kind", "steps", "created_at", "changed_elements", "total_elements", "bytes", "codec")
_SHOWN_TOO = ("manifest", "parent", "signed_by", "anchor", "folds", "metrics")


@dataclass(frozen=True)
class Look:
    """One look at a run, or what is there before the first: rows that nobody changes any more.

    ``problems`` are for somebody to act on, ``ends`` is why nothing older than these versions can be read.
    """

    uri: str
    run: str | None = None
    versions: tuple[Row, ...] = ()
    replicas: tuple[Row, ...] = ()
    complete: bool = False
    looked: bool = False
    problems: tuple[str, ...] = ()
    ends: str | None = None


def sections(look: Look, window: str, heat: HeatMap, times: CommitTimes) -> dict[str, dict[str, Any]]:
    """The page's parts by name; a part is sent again only when it changed."""
    last = WINDOWS[window]
    shown = look.versions if last is None else look.versions[-last:]
    return {
        "run": _run(look),
        "versions": _timeline(shown) | {"window": window},
        "newest": {"rows": [_picked(row, _SHOWN + _SHOWN_TOO) for row in look.versions[: -NEWEST - 1 : -1]]},
        "replicas": _replicas(look.replicas),
        "heat": _heat(shown, heat),
        "commits": _commits(shown, times),
    }


def _run(look: Look) -> dict[str, Any]:
    newest = look.versions[-1] if look.versions else None
    return {
        "uri": look.uri,
        "run": look.run,
        "newest": newest and _picked(newest, _SHOWN),
        "held": len(look.versions),
        "oldest": look.versions[0]["version"] if look.versions else None,
        "complete": look.complete,
        "looked": look.looked,
        "problems": list(look.problems),
        "ends": look.ends,
        "chain": _chain(look.versions),
    }


def _chain(versions: Sequence[Row]) -> dict[str, Any] | None:
    """What a replica that starts now has to fetch after the newest anchor; None if there is none in sight."""
    count, total = 0, 0
    for row in reversed(versions):
        adapter, newest = row["kind"] == "adapter", row is versions[-1]
        total += row["bytes"] if newest and adapter else 0  # of adapters only the newest version's is served
        if row["anchor"] and "error" not in row["anchor"]:
            return {"anchor": row["version"], "anchor_bytes": row["anchor"]["bytes"], "deltas": count, "bytes": total}
        if row["kind"] == "delta":
            count, total = count + 1, total + row["bytes"]
    return None


def _timeline(versions: Sequence[Row]) -> dict[str, Any]:
    """Points of 2^k versions each, so that they stay where they are as the run grows."""
    step = stride(len(versions), POINTS)
    points: list[list[Row]] = []
    for row in versions:
        if points and points[-1][0]["version"] // step == row["version"] // step:
            points[-1].append(row)
        else:
            points.append([row])
    starts = [row for before, row in itertools.pairwise(versions) if before["epoch"] != row["epoch"]]
    return {
        "step": step,
        "first": [point[0]["version"] for point in points],
        "last": [point[-1]["version"] for point in points],
        "steps": [point[-1]["steps"][1] for point in points],
        "created_at": [round(point[-1]["created_at"], 3) for point in points],
        "bytes": _column(points, lambda row: row["bytes"], statistics.fmean),
        "bytes_max": _column(points, lambda row: row["bytes"], max),
        "changed": _column(points, _share, statistics.fmean),
        "changed_max": _column(points, _share, max),
        "reward": _column(points, lambda row: row["metrics"].get("reward"), statistics.fmean),
        "anchors": [sum(1 for row in point if row["anchor"]) for point in points],
        "folds": [sum(len(row["folds"]) for row in point) for point in points],
        "epochs": [{"version": row["version"], "epoch": row["epoch"]} for row in starts[-50:]],
    }


def _column(
    points: Iterable[Sequence[Row]], value: Callable[[Row], float | None], of: Callable[[Sequence[float]], float]
) -> list[float | None]:
    found = ([v for row in point if (v := value(row)) is not None] for point in points)
    return [_digits(of([_bounded(v) for v in values])) if values else None for values in found]


def _share(row: Row) -> float | None:
    """An origin changes nothing, it begins."""
    return None if row["kind"] == "origin" else row["changed_elements"] / max(1, row["total_elements"])


def _replicas(rows: Sequence[Row]) -> dict[str, Any]:
    counts = {health: sum(row["health"] == health for row in rows) for health in _BY_NEED}
    order = sorted(rows, key=lambda row: (_BY_NEED.index(row["health"]), -(row["lag"] or 0), row["replica"]))
    shown = [row | {"error": row["error"] and row["error"][:ERROR_CHARACTERS]} for row in order[:REPLICAS]]
    for row in shown:
        del row["refused_object"]
    return {"rows": shown, "count": len(rows), "counts": {k: n for k, n in counts.items() if n}}


def _heat(versions: Sequence[Row], heat: HeatMap) -> dict[str, Any]:
    columns = sample(versions)
    return {
        "step": stride(len(versions), COLUMNS),
        "versions": [row["version"] for row in columns],
        "layer": heat.matrix(columns, "layer"),
        "kind": heat.matrix(columns, "kind"),
    }


def _commits(versions: Sequence[Row], times: CommitTimes) -> dict[str, Any]:
    found = [(row["version"], times.of(row["version"])) for row in versions]
    known = [(version, told) for version, told in found if told]
    step = stride(len(known), POINTS)
    groups = [known[at : at + step] for at in range(0, len(known), step)]
    document: dict[str, Any] = {"version": [group[-1][0] for group in groups], "since": times.since}
    for name in ("gap_seconds", "served_seconds"):
        values = [[told[name] for _, tolds in group for told in tolds if name in told] for group in groups]
        document[name] = [_digits(statistics.median(map(_bounded, v))) if v else None for v in values]
        document[name + "_max"] = [_digits(max(v)) if v else None for v in values]
    return document


def _picked(row: Row, names: Sequence[str]) -> Row:
    return {name: row[name] for name in names}


def _digits(value: float) -> float:
    return float(f"{_bounded(value):.4g}")


def _bounded(value: float) -> float:
    """Numbers of which neither a sum nor a rounding is infinite, which JSON does not have."""
    return min(max(value, -_LARGEST), _LARGEST)
