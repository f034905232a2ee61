"""What a mirror would copy, found by listing both sides and reading nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delta_sync.cli.report import FINE, PROBLEM, Report, Table, size
from delta_sync.cli.timed_store import TimedStore
from delta_sync.store.base import Store
from delta_sync.store.keys import ANCHORS, EPOCHS, FOLDS, MANIFESTS
from delta_sync.store.open import shown_uri

COPIED = (EPOCHS, "deltas/", "adapters/", MANIFESTS, ANCHORS, FOLDS)


def look(source: str, targets: Sequence[str]) -> Report:
    """One row for each destination: objects that it lacks, at most, and whether it is another's."""
    wanted = _sizes(TimedStore(source))
    rows = [_row(uri, wanted) for uri in targets]
    document: dict[str, object] = {"source": shown_uri(source), "dry_run": True, "destinations": rows}
    columns = ("destination", "result", ">objects", ">bytes")
    cells = [[row["uri"], row["result"], row["objects"], size(row["bytes"])] for row in rows]
    refused = any(row["foreign"] for row in rows)
    errors = [f"{row['uri']}: {row['foreign'][0]} is not the source's" for row in rows if row["foreign"]]
    return Report(document, [Table(shown_uri(source), columns, cells)], PROBLEM if refused else FINE, errors)


def _row(uri: str, wanted: dict[str, int]) -> dict[str, Any]:
    there = _sizes(TimedStore(uri))
    missing = [key for key, count in wanted.items() if there.get(key) != count]
    foreign = sorted(key for key in there if key.startswith(EPOCHS) and key not in wanted)
    return {
        "uri": shown_uri(uri),
        "result": "would refuse" if foreign else "would copy" if missing else "nothing to copy",
        "objects": len(missing),
        "bytes": sum(wanted[key] for key in missing),
        "foreign": foreign,
    }


def _sizes(store: Store) -> dict[str, int]:
    return {info.key: info.size for prefix in COPIED for info in store.list(prefix)}
