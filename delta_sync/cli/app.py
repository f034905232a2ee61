"""All commands, under one name."""

from __future__ import annotations

import typer

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
from delta_sync.cli.reset import reset
from delta_sync.cli.ui import ui
from delta_sync.cli.verify import verify
from delta_sync.cli.watch import watch

app = typer.Typer(
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
