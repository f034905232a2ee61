"""``delta-sync reset``: have the chain forgotten; the next version starts a new one."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from delta_sync.claims import check_reset_key, claim_reset, newest_claim, reset_pending
from delta_sync.cli.report import FINE, AsJson, Report, age, finish
from delta_sync.cli.run import DAMAGE, PublicKey, checked_run, open_ledger, read_signing_key
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest


def reset(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would happen, and write nothing.")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    public_key: PublicKey = None,
    signing_key: Annotated[
        str | None, typer.Option("--signing-key", metavar="PATH", help="The trainer's key, if the run is signed.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Have a run's chain forgotten: the next version is an origin with complete weights, needing nothing before it.

    Deletes nothing: servers go on with what they have until that version comes. A trainer that is at work makes it in
    place of its next delta; otherwise the next one that starts does.
    """
    if as_json and not (yes or dry_run):
        raise typer.BadParameter("nobody can be asked with --json: give --yes or --dry-run too", param_hint="--json")
    finish(as_json, lambda: _report(open_ledger(uri, public_key), signing_key, dry_run=dry_run, yes=yes))


def _report(ledger: Ledger, signing_key: str | None, *, dry_run: bool, yes: bool) -> Report:
    key = read_signing_key(signing_key)
    claim, head = newest_claim(ledger), _head(ledger)
    # Of a version that cannot be read nobody knows whether it came before an earlier reset: one more does no harm.
    pending = head is not None and reset_pending(ledger, head.epoch, claim.epoch + 1)
    after = f"version {head.version}" if head else "a version that cannot be read"
    what = f"run {claim.run} after {after}: the next version is an origin with complete weights"
    done = not (dry_run or pending)
    if not pending:
        check_reset_key(ledger, claim, key)  # before somebody is asked
    if done and not yes:
        typer.confirm(
            f"{what}; {claim.writer} of epoch {claim.epoch} may be at work. Forget the chain?", abort=True, err=True
        )
    made = claim_reset(ledger, key) if done else claim
    document: dict[str, object] = {
        "uri": ledger.store.uri,
        "run": claim.run,
        "newest": head.version if head else None,
        "epoch": made.epoch,
        "reset": done,
        "pending_before": pending,
    }
    when = f"reset {age(time.time() - claim.created_at)} ago already, nothing was published since"
    said = when if pending else "would reset" if dry_run else f"reset, epoch {made.epoch}"
    return Report(document, [f"{said}: {what}"], FINE)


def _head(ledger: Ledger) -> Manifest | None:
    try:
        return ledger.head()
    except DAMAGE:
        return None
