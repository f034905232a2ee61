"""``delta-sync ui``: a run as a page in the browser."""

from __future__ import annotations

import contextlib
import ipaddress
import threading
import webbrowser
from typing import Annotated

import typer

from delta_sync.cli.dashboard.live import LiveRun
from delta_sync.cli.dashboard.server import DashboardServer
from delta_sync.cli.report import USAGE, exit_code_of, printable
from delta_sync.cli.run import AckUri, PublicKey, checked_run, open_ledger
from delta_sync.cli.view import RunView
from delta_sync.errors import DeltaSyncError

PORT = 7788


def ui(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = PORT,
    host: Annotated[str, typer.Option(help="The address to listen at; others than loopback let others look.")] = (
        "127.0.0.1"
    ),
    browser: Annotated[bool, typer.Option(help="Open the page.")] = True,
    last: Annotated[int, typer.Option(min=1, help="Read at most so many of the newest versions.")] = 20_000,
    interval: Annotated[float, typer.Option(min=0.05, help="Seconds between two looks.")] = 1.0,
    ack_uri: AckUri = None,
    public_key: PublicKey = None,
) -> None:
    """One page about a run, live and read only: versions, fleet, where the model changes, gaps at commits, reward.

    Runs until Ctrl-C. Exits with 2 if the address is taken, 3 if the store cannot be opened.
    """
    try:
        view = RunView(open_ledger(uri, public_key, ack_uri), last)
        live = LiveRun(view, interval)
        server = DashboardServer(live, host, port)
    except DeltaSyncError as error:
        typer.echo(f"delta-sync: {printable(error)}", err=True)
        raise typer.Exit(exit_code_of(error)) from None
    except OSError as error:
        typer.echo(f"delta-sync: cannot listen at {host}:{port}: {error}. Remedy: another --port, or 0", err=True)
        raise typer.Exit(USAGE) from None
    with live, server, contextlib.suppress(KeyboardInterrupt):
        typer.echo(f"{server.url}  shows {view.ledger.store.uri}; Ctrl-C ends it")
        if not _is_loopback(host):
            typer.echo("delta-sync: whoever reaches this address can look at the run, without a password", err=True)
        if browser:
            # Aside: a browser in the terminal keeps its caller waiting, and there is nothing to see before we serve.
            threading.Thread(target=webbrowser.open, args=(server.url,), daemon=True).start()
        server.serve_forever()


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
