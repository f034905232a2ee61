"""``delta-sync ledger``: what is in a run, and who serves what."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from delta_sync.cli.report import FINE, PROBLEM, AsJson, Report, Table, finish
from delta_sync.cli.run import AckUri, PublicKey, checked_run, newest, open_ledger
from delta_sync.cli.run_tables import replicas_table, versions_table
from delta_sync.cli.view import RunView


def ledger(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    last: Annotated[int | None, typer.Option(min=1, help="Only so many of the newest versions.")] = None,
    ack_uri: AckUri = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Every version of a run, and every replica that acknowledged one.

    Exits with 1 if there is no version, a manifest or an anchor's record is damaged, or a replica refused a version.
    """
    finish(as_json, lambda: _report(RunView(open_ledger(uri, public_key, ack_uri), last)))


def _report(view: RunView) -> Report:
    view.refresh()
    if view.newest is None:
        newest(view.ledger)  # says that there is none
    return Report(document(view), _parts(view), PROBLEM if view.damaged or view.troubled else FINE)


def document(view: RunView) -> dict[str, object]:
    """The whole view as JSON values, with ages as of now."""
    now, top = time.time(), view.newest or {}
    return {
        "uri": view.ledger.store.uri,
        "run": view.run,
        "newest": top.get("version"),
        "epoch": top.get("epoch"),
        "versions": [row | {"age_seconds": now - row["created_at"]} for row in view.versions],
        "damaged_newest": str(view.damaged_newest) if view.damaged_newest else None,
        "chain_end": str(view.chain_end) if view.chain_end else None,
        "replicas": [row | {"age_seconds": now - row["time"]} for row in view.replicas],
    }


def headline(view: RunView) -> str:
    """Which run this is, and how far it got."""
    top, uri = view.newest, view.ledger.store.uri
    return f"run {view.run} at {uri}: version {top['version']}, epoch {top['epoch']}" if top else f"no version at {uri}"


def _parts(view: RunView) -> list[Table | str]:
    now = time.time()
    parts: list[Table | str] = [headline(view), versions_table(view.versions, now)]
    if view.damaged_newest:
        parts.append(f"a newer one is damaged: {view.damaged_newest}")
    if view.chain_end:
        parts.append(f"nothing older: {view.chain_end}")
    parts.append(replicas_table(view.replicas, now) if view.replicas else "no replica acknowledged a version")
    return parts
