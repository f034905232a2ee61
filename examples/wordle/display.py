"""Live progress: a table that redraws itself on a terminal, a line per new version elsewhere."""

from __future__ import annotations

import time
from typing import Any, Self

from rich.console import Console
from rich.live import Live
from rich.table import Table

PLAIN_PERIOD = 20.0  # seconds between lines while nothing changes, where there is no terminal


class Display:
    """Shows named rows of text on stderr, so that stdout carries only the result."""

    def __init__(self) -> None:
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, refresh_per_second=4, transient=False)
        self._rows: dict[str, str] = {}
        self._started = self._printed_at = time.monotonic()
        self._printed = ""

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._live.stop()

    def say(self, text: str) -> None:
        """A line that stays."""
        self._console.print(
            f"[dim]{time.monotonic() - self._started:6.1f} s[/dim]  {text}", highlight=False, soft_wrap=True
        )

    def show(self, **rows: Any) -> None:
        """Set rows by name; None removes one."""
        self._rows |= {name.replace("_", " "): str(text) for name, text in rows.items() if text is not None}
        for name in [name for name, text in rows.items() if text is None]:
            self._rows.pop(name.replace("_", " "), None)
        if self._console.is_terminal:
            self._live.update(self._table())
        else:
            self._print_changes()

    def _table(self) -> Table:
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
        for name, text in self._rows.items():
            table.add_row(f"[bold]{name}[/bold]", text)
        table.add_row("[bold]elapsed[/bold]", f"{time.monotonic() - self._started:.0f} s")
        return table

    def _print_changes(self) -> None:
        key = self._rows.get("weights", "")
        if key != self._printed or time.monotonic() - self._printed_at > PLAIN_PERIOD:
            self._printed, self._printed_at = key, time.monotonic()
            self.say("  ".join(f"{name}: {text}" for name, text in self._rows.items()))
