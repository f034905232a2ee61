"""What a command has to say, how it says it, and the exit code that goes with it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from delta_sync.errors import DeltaSyncError, NotFoundError, StoreError, SyncTimeoutError

FINE, PROBLEM, USAGE, UNREACHABLE = 0, 1, 2, 3
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output, and nothing else.")]


@dataclass(frozen=True)
class Table:
    """Rows of texts; a column's name that begins with ``>`` aligns it to the right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[object]]


@dataclass(frozen=True)
class Report:
    """``document`` is what ``--json`` prints, ``parts`` what a person reads, ``exit_code`` what a script asks.

    An empty document is not printed: all was said line by line before.
    """

    document: dict[str, object]
    parts: Sequence[Table | str] = ()
    exit_code: int = FINE
    errors: Sequence[str] = field(default=())  # to standard error


def finish(as_json: bool, make: Callable[[], Report]) -> None:
    """Print what ``make`` returns, or the error that it raises, and exit with its code."""
    try:
        report = make()
    except DeltaSyncError as error:
        report = _failed(error, exit_code_of(error))
    except OSError as error:  # a local file or folder that the user named
        report = _failed(error, PROBLEM)
    try:
        _show(report, as_json)
        sys.stdout.flush()
    except OSError as error:
        # Nothing more can be said there, and what is still buffered must not fail again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(error, BrokenPipeError):  # who closed a pipe has read enough: what was found stays so
            report = _failed(OSError(error.errno, error.strerror, "standard output"), PROBLEM)
    for line in report.errors:
        warn(line)
    raise typer.Exit(report.exit_code)


def warn(text: str) -> None:
    """A line on standard error, which --json leaves to such."""
    typer.echo(f"delta-sync: {printable(text)}", err=True)


def as_text(document: Mapping[str, object], indent: int | None = None) -> str:
    """JSON in ASCII: neither a terminal nor its encoding can stumble over what a bucket holds."""
    return json.dumps(document, indent=indent)


def error_document(kind: str, message: str) -> dict[str, object]:
    """What ``--json`` prints where there is nothing to report."""
    return {"error": {"kind": kind, "message": message}}


def exit_code_of(error: DeltaSyncError) -> int:
    """3 where the store failed, 1 where what it holds is wrong."""
    unreachable = isinstance(error, (StoreError, SyncTimeoutError)) and not isinstance(error, NotFoundError)
    return UNREACHABLE if unreachable else PROBLEM


def _failed(error: DeltaSyncError | OSError, code: int) -> Report:
    message = str(error)
    if isinstance(error, OSError) and error.strerror:  # without "[Errno 28]"
        message = f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return Report(error_document(type(error).__name__, message), exit_code=code, errors=[message])


def _show(report: Report, as_json: bool) -> None:
    if as_json:
        if report.document:
            typer.echo(as_text(report.document, None if "error" in report.document else 2))
        return
    for number, part in enumerate(report.parts):
        if number and isinstance(part, Table):
            typer.echo()
        _print(part)


def printable(value: object) -> str:
    """Text that may go to a terminal: whoever writes to the bucket must not steer it."""
    return "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in str(value))


def _print(part: Table | str) -> None:
    if isinstance(part, str):
        typer.echo(printable(part))
    elif sys.stdout.isatty():
        _print_rich(part)
    else:
        _print_plain(part)


def _print_rich(table: Table) -> None:
    Console().print(rich_table(table))


def rich_table(table: Table) -> RichTable:
    """The same for a terminal."""
    rich = RichTable(title=Text(printable(table.title)), title_justify="left")
    for column in table.columns:
        rich.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    for row in table.rows:
        rich.add_row(*(Text(printable(value)) for value in row))
    return rich


def _print_plain(table: Table) -> None:
    names = [column.lstrip(">") for column in table.columns]
    lines = [names, *([printable(value) for value in row] for row in table.rows)]
    widths = [max(len(line[k]) for line in lines) for k in range(len(names))]
    typer.echo(printable(table.title))
    for line in lines:
        cells = (
            text.rjust(width) if column.startswith(">") else text.ljust(width)
            for text, width, column in zip(line, widths, table.columns, strict=True)
        )
        typer.echo("  ".join(cells).rstrip())


def gist(text: str) -> str:
    """A message without its numbers: a failure that repeats has other times and ports, and is said once."""
    return re.sub(r"[0-9]+(?:\.[0-9]+)?", "#", text)


def percent(part: int, whole: int) -> str:
    """``1.28%``; ``-`` of nothing."""
    return f"{100 * part / whole:.2f}%" if whole else "-"


def bar(part: float, most: float, width: int = 24) -> str:
    """A bar of at most ``width`` characters, in eighths of one; empty only for nothing."""
    eighths = 0 if not most else max(part > 0, round(8 * width * part / most))
    return "█" * (eighths // 8) + " ▏▎▍▌▋▊▉"[eighths % 8].strip()


def duration(seconds: float | None) -> str:
    """How long something took, for people: ``7.5ms``, ``340ms``, ``1.2s``, ``3m``; ``-`` of None."""
    if seconds is None:
        return "-"
    if abs(seconds) < 1:
        return f"{1000 * seconds:.{1 if abs(seconds) < 0.1 else 0}f}ms"
    return f"{seconds:.1f}s" if abs(seconds) < 60 else age(seconds)


def many(count: int, what: str) -> str:
    """``1 file``, ``1,024 files``."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size(count: int) -> str:
    """Bytes for people: ``512 B``, ``1.5 MiB``."""
    value, unit = float(count), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if value < 1024 or unit == "TiB":
            break
        value /= 1024
    return f"{count} B" if unit == "B" else f"{value:.1f} {unit}"


def age(seconds: float) -> str:
    """Time gone by, for people: ``8s``, ``3m``, ``5.2h``, ``2.0d``; a clock that is behind gives a negative one."""
    for unit, length, digits in (("d", 86400.0, 1), ("h", 3600.0, 1), ("m", 60.0, 0)):
        if abs(seconds) >= length:
            value = seconds / length
            return f"{value:.{digits}f}{unit}" if abs(value) < 1e6 else f"{value:.0e}{unit}"
    return f"{seconds:.0f}s"
