"""All commands, under one name."""

from __future__ import annotations

from importlib.metadata import version
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from delta_sync.cli.apply import apply
from delta_sync.cli.bench import bench
from delta_sync.cli.compact import compact
from delta_sync.cli.control import pin, reload, rollback, unpin
from delta_sync.cli.diff import diff
from delta_sync.cli.doctor import doctor
from delta_sync.cli.gc import gc
from delta_sync.cli.inspect import inspect
from delta_sync.cli.keygen import keygen
from delta_sync.cli.ledger import ledger
from delta_sync.cli.materialize import materialize
from delta_sync.cli.mirror import mirror
from delta_sync.cli.parity import parity
from delta_sync.cli.report import as_text, error_document
from delta_sync.cli.reset import reset
from delta_sync.cli.ui import ui
from delta_sync.cli.verify import verify
from delta_sync.cli.watch import watch

_UsageError: type[Any] = typer.BadParameter.__mro__[1]  # click's, or that of the copy which newer typers bring


class _Commands(TyperGroup):
    """Says what was wrongly used as a document too, where one was asked for."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        ctx.meta["delta_sync.json"] = "--json" in args
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except _UsageError as error:
            if ctx.meta["delta_sync.json"]:
                typer.echo(as_text(error_document("UsageError", error.format_message())))
            raise


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"delta-sync {version('delta-weight-sync')}")
        raise typer.Exit


app = typer.Typer(
    cls=_Commands,
    help="Look at a run of delta-weight-sync, prove it, get checkpoints out of it, and keep it small.",
    epilog="Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 3 the store did not answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (
    ledger, watch, ui, inspect, diff, verify, materialize, apply, pin, unpin, rollback, reload, reset,
    compact, gc, mirror, doctor, keygen, parity, bench,
):  # fmt: skip
    app.command()(command)


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", is_eager=True, callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """What may stand before a command."""
