"""What stands above a table comes from the bucket too, and the page is served while a browser begins."""

from __future__ import annotations

import threading
import time

import pytest
from rich.console import Console
from typer.testing import CliRunner

from delta_sync.cli import ui as command
from delta_sync.cli.app import app
from delta_sync.cli.report import Table, _print_plain, rich_table

TITLE = "\x1b[31mred[/x] of /runs/[gpu]/a"


def test_a_title_steers_no_terminal_and_is_shown_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(TITLE, ("a",), (("1" * 60,),))  # a title is as wide as its table
    _print_plain(table)
    assert capsys.readouterr().out.splitlines()[0] == r"\x1b[31mred[/x] of /runs/[gpu]/a"
    console = Console(width=200)
    with console.capture() as shown:
        console.print(rich_table(table))
    assert r"\x1b[31mred[/x] of /runs/[gpu]/a" in shown.get()


def test_a_browser_that_keeps_its_caller_waiting_is_served(run, monkeypatch: pytest.MonkeyPatch) -> None:
    served = threading.Event()
    monkeypatch.setattr(command.webbrowser, "open", lambda url: served.wait(20))
    monkeypatch.setattr(command.DashboardServer, "serve_forever", lambda self: served.set())
    began = time.monotonic()
    assert CliRunner().invoke(app, ["ui", run.uri, "--port", "0"]).exit_code == 0
    assert time.monotonic() - began < 15
