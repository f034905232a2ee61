"""What a mirror would copy, found by listing both sides and reading nothing but claims of epochs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delta_sync.cli.report import FINE, PROBLEM, Report, Table, size
from delta_sync.cli.timed_store import TimedStore
from delta_sync.limits import DEFAULT_LIMITS
from delta_sync.store.base import Store
from delta_sync.store.keys import ANCHORS, EPOCHS, FOLDS, MANIFESTS
from delta_sync.store.open import shown_uri

COPIED = (EPOCHS, "deltas/", "adapters/", MANIFESTS, ANCHORS, FOLDS)


def look(source: str, targets: Sequence[str]) -> Report:
    """One row for each destination: objects that it lacks, at most, and whether it is another's."""
    store = TimedStore(source)
    wanted = _sizes(store)
    rows = [_row(uri, store, wanted) for uri in targets]
    document: dict[str, object] = {"source": shown_uri(source), "dry_run": True, "destinations": rows}
    columns = ("destination", "result", ">objects", ">bytes")
    cells = [[row["uri"], row["result"], row["objects"], size(row["bytes"])] for row in rows]
    refused = any(row["foreign"] for row in rows)
    errors = [f"{row['uri']}: {row['foreign'][0]} is not the source's" for row in rows if row["foreign"]]
    return Report(document, [Table(shown_uri(source), columns, cells)], PROBLEM if refused else FINE, errors)


def _row(uri: str, source: Store, wanted: dict[str, int]) -> dict[str, Any]:
    target = TimedStore(uri)
    there = _sizes(target)
    missing = [key for key, count in wanted.items() if there.get(key) != count]
    claims = [key for key in sorted(there) if key.startswith(EPOCHS)]
    foreign = [key for key in claims if key not in wanted or _claim(target, key) != _claim(source, key)]
    return {
        "uri": shown_uri(uri),
        "result": "would refuse" if foreign else "would copy" if missing else "nothing to copy",
        "objects": len(missing),
        "bytes": sum(wanted[key] for key in missing),
        "foreign": foreign,
    }


def _claim(store: Store, key: str) -> bytes:
    return store.get(key, max_bytes=DEFAULT_LIMITS.manifest_bytes)


def _sizes(store: Store) -> dict[str, int]:
    return {info.key: info.size for prefix in COPIED for info in store.list(prefix)}
