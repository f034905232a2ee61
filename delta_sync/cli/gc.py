"""``delta-sync gc``: delete the versions that nobody needs any more."""

from __future__ import annotations

from typing import Annotated

import typer

from delta_sync.cli.report import FINE, AsJson, Report, finish, many, size
from delta_sync.cli.run import AckUri, PublicKey, checked_run, open_ledger
from delta_sync.ledger import Ledger
from delta_sync.retention import DEFAULT_GRACE, Trim, delete, find_trim


def gc(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    keep: Annotated[int, typer.Option(min=1, help="Newest anchors that stay, with the versions from there on.")],
    grace: Annotated[
        float, typer.Option(min=0, help="Seconds that what is no longer needed stays for who is reading it.")
    ] = DEFAULT_GRACE,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would go, and delete nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    ack_uri: AckUri = None,
    public_key: PublicKey = None,
    as_json: AsJson = False,
) -> None:
    """Delete old versions: their manifests, then their anchors' and folds' records, then data. HEAD and epochs stay.

    A replica that was heard of within a day is never cut off. May be run while trainer and replicas do. With
    --public-key only anchors that are signed count.
    """
    if as_json and not (yes or dry_run):
        raise typer.BadParameter("nobody can be asked with --json: give --yes or --dry-run too", param_hint="--json")
    finish(as_json, lambda: _report(open_ledger(uri, public_key, ack_uri), keep, grace, dry_run=dry_run, yes=yes))


def _report(ledger: Ledger, keep: int, grace: float, *, dry_run: bool, yes: bool) -> Report:
    trim = find_trim(ledger, keep, grace)
    what = _what(trim)
    done = bool(trim.keys) and not dry_run
    if done and not yes:
        typer.confirm(f"{what}. Delete for good?", abort=True, err=True)
    if done:
        delete(ledger.store, trim.keys)
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "first_kept": trim.first_kept,
        "held_by": trim.held_by,
        "objects": len(trim.keys),
        "orphans": trim.orphans,
        "bytes": trim.bytes,
        "keys": list(trim.keys),
        "deleted": done,
    }
    said = f"deleted {what}" if done else f"would delete {what}" if trim.keys else what
    keys = list(trim.keys) if dry_run else []
    return Report(document, [said, _why(trim), *keys], FINE)


def _what(trim: Trim) -> str:
    if not trim.keys:
        return "nothing to delete"
    orphans = f", {many(trim.orphans, 'orphan')} among them" if trim.orphans else ""
    return f"{many(len(trim.keys), 'object')} of {size(trim.bytes)}{orphans}"


def _why(trim: Trim) -> str:
    if trim.first_kept is None:
        return f"every version stays: {trim.held_by}"
    return f"versions from {trim.first_kept} on stay, for {trim.held_by}"
