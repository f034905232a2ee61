"""All commands, under one name."""

from __future__ import annotations

import typer

from delta_sync.cli.compact import compact
from delta_sync.cli.doctor import doctor
from delta_sync.cli.gc import gc
from delta_sync.cli.inspect import inspect
from delta_sync.cli.keygen import keygen
from delta_sync.cli.ledger import ledger
from delta_sync.cli.materialize import materialize
from delta_sync.cli.mirror import mirror
from delta_sync.cli.ui import ui
from delta_sync.cli.verify import verify
from delta_sync.cli.watch import watch

app = typer.Typer(
    help="Look at a run of delta-weight-sync, prove it, get checkpoints out of it, and keep it small.",
    epilog="Exit codes: 0 fine, 1 a problem was found, 2 wrong usage, 3 the store did not answer.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
for command in (ledger, watch, ui, inspect, verify, materialize, compact, gc, mirror, doctor, keygen):
    app.command()(command)
