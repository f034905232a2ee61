"""What differs between two looks at a run: one flat document for each thing that happened."""

from __future__ import annotations

import time
from collections.abc import Iterator

from delta_sync.cli.report import age, duration, percent, size
from delta_sync.cli.run_tables import silence, steps, trouble
from delta_sync.cli.view import Row, RunView


class Changes:
    """Remembers what it told of a view; each call of ``told`` yields only what is new since the last."""

    def __init__(self) -> None:
        self._versions: dict[str, Row] = {}  # by sha256 of the manifest
        self._replicas: dict[str, Row] = {}

    def told(self, view: RunView) -> Iterator[Row]:
        """Documents with an ``event``: version, left, anchor, fold, replica or gone, in the order of the run."""
        versions = {row["manifest"]: row for row in view.versions}
        for manifest, row in self._versions.items():
            if manifest not in versions and row["version"] >= view.versions[0]["version"]:
                yield {"event": "left", "version": row["version"], "epoch": row["epoch"], "manifest": manifest}
        for manifest, row in versions.items():
            yield from _about_version(self._versions.get(manifest), row)
        replicas = {row["replica"]: row for row in view.replicas}
        for name, row in replicas.items():
            if self._replicas.get(name) != row:
                yield {"event": "replica"} | row
        for name in self._replicas.keys() - replicas.keys():
            yield {"event": "gone", "replica": name}
        self._versions, self._replicas = versions, replicas


def _about_version(before: Row | None, row: Row) -> Iterator[Row]:
    if before is None:
        yield {"event": "version"} | row
        return
    place = {"version": row["version"], "epoch": row["epoch"]}
    if row["anchor"] != before["anchor"]:
        yield {"event": "anchor"} | place | {"anchor": row["anchor"]}
    for base in row["folds"]:
        if base not in before["folds"]:
            yield {"event": "fold"} | place | {"base_version": base}


def sentence(event: Row) -> str:
    """One event as one line for people."""
    match event["event"]:
        case "version":
            changed = percent(event["changed_elements"], event["total_elements"])
            return (
                f"version {event['version']}: {event['kind']}, step {steps(event)}, {changed}, {size(event['bytes'])}"
            )
        case "left":
            return f"version {event['version']} of epoch {event['epoch']} is no part of the run any more"
        case "anchor" if event["anchor"] is None:
            return f"version {event['version']} has no anchor any more"
        case "anchor" if "error" in event["anchor"]:
            return f"version {event['version']} has a damaged anchor: {event['anchor']['error']}"
        case "anchor":
            return f"version {event['version']} has an anchor: {size(event['anchor']['bytes'])}"
        case "fold":
            return f"version {event['version']} has a fold from version {event['base_version']}"
        case "gone":
            return f"replica {event['replica']} took its acknowledgement away"
        case "replica":
            return _of_replica(event)
        case _:
            return str(event.get("message", event["event"]))


def _of_replica(event: Row) -> str:
    served = "no version yet" if event["version"] is None else f"version {event['version']}, {event['lag']} behind"
    took = event["performance"].get("served_seconds")
    after = "" if took is None else f", served after {duration(took)}"
    wrong, silent = trouble(event), silence(event, time.time())
    health = event["health"] if silent is None else f"silent for {age(silent)}"
    return f"replica {event['replica']}: {health}, {served}{after}{'' if wrong == '-' else f'. {wrong}'}"
