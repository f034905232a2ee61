"""``delta-sync watch``: a run as it goes on."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Annotated

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from delta_sync.cli.changes import Changes, sentence
from delta_sync.cli.ledger import headline
from delta_sync.cli.report import FINE, PROBLEM, as_text, error_document, exit_code_of, gist, printable, rich_table
from delta_sync.cli.run import AckUri, PublicKey, checked_run, open_ledger
from delta_sync.cli.run_tables import replicas_table, versions_table
from delta_sync.cli.view import RunView
from delta_sync.errors import DeltaSyncError

Show = Callable[[RunView, DeltaSyncError | None], None]
AsLines = Annotated[bool, typer.Option("--json", help="One JSON document a line for each thing that happens.")]
OTHER_LINES = 14  # of a terminal, besides the rows of versions and replicas


def watch(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    last: Annotated[int, typer.Option(min=1, help="Begin with so many of the newest versions.")] = 20,
    for_seconds: Annotated[
        float | None, typer.Option("--for", metavar="SECONDS", min=0, help="End after so long; else on Ctrl-C.")
    ] = None,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    ack_uri: AckUri = None,
    public_key: PublicKey = None,
    as_json: AsLines = False,
) -> None:
    """A run's versions and replicas, live: tables in a terminal, elsewhere a line for each thing that happens.

    Waits for the first version, and goes on where the store fails for a while. Exits with what the last look found:
    1 for damage or a replica that refuses, 3 if the store did not answer, else 0.
    """
    deadline = None if for_seconds is None else time.monotonic() + for_seconds
    try:
        view = RunView(open_ledger(uri, public_key, ack_uri), last)
        if as_json or not sys.stdout.isatty():
            code = _follow(view, _lines(as_json), deadline, interval)
        else:
            with Live(Text(f"looking at {view.ledger.store.uri}"), auto_refresh=False) as live:
                code = _follow(view, _screen(live), deadline, interval)
    except DeltaSyncError as error:  # before the first look: the store cannot even be opened
        if as_json:
            typer.echo(as_text(error_document(type(error).__name__, str(error))))
        typer.echo(f"delta-sync: {printable(error)}", err=True)
        code = exit_code_of(error)
    raise typer.Exit(code)


def _follow(view: RunView, show: Show, deadline: float | None, interval: float) -> int:
    """Look and show until the deadline or Ctrl-C; the exit code of the last look."""
    code = FINE
    try:
        while True:
            began, failed = time.monotonic(), None
            try:
                view.refresh()
            except DeltaSyncError as error:
                failed = error
            code = exit_code_of(failed) if failed else PROBLEM if view.damaged or view.troubled else FINE
            show(view, failed)
            # A slow store is not asked all the time.
            pause = max(interval, 2 * (time.monotonic() - began))
            left = pause if deadline is None else min(pause, deadline - time.monotonic())
            if left <= 0:
                return code
            time.sleep(left)
    except KeyboardInterrupt:
        return code


def _lines(as_json: bool) -> Show:
    changes = Changes()
    said: list[str | None] = [None]

    def show(view: RunView, failed: DeltaSyncError | None) -> None:
        events = list(changes.told(view))
        problem = str(failed) if failed else None
        if (new := gist(problem) if problem else None) != said[0]:
            kind = type(failed).__name__ if failed else None
            message = problem or "the run can be read again"
            events.append({"event": "error" if failed else "recovered", "kind": kind, "message": message})
            said[0] = new
        for event in events:
            typer.echo(as_text(event) if as_json else printable(sentence(event)))
        sys.stdout.flush()

    return show


def _screen(live: Live) -> Show:
    def show(view: RunView, failed: DeltaSyncError | None) -> None:
        now, parts = time.time(), list[RenderableType]()
        parts.append(Text(printable(headline(view))))
        room = max(2, live.console.height - OTHER_LINES)
        worst = sorted(view.replicas, key=lambda row: (row["state"] == "live", -(row["lag"] or 0), row["replica"]))
        shown = worst[: max(1, room // 2)]
        if view.versions:
            versions = view.versions[::-1][: max(1, room - len(shown))]
            parts.append(rich_table(versions_table(versions, now)))
        parts.append(rich_table(replicas_table(shown, now)) if shown else Text("no replica acknowledged a version"))
        if len(shown) < len(worst):
            parts.append(Text(f"and {len(worst) - len(shown)} replicas that are better off"))
        problem = failed or view.damaged_newest
        if problem:
            parts.append(Text(printable(problem), style="bold red"))
        live.update(Group(*parts), refresh=True)

    return show
