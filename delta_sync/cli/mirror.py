"""``delta-sync mirror``: a run copied to other stores, and kept up there."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from delta_sync.cli.mirror_look import look
from delta_sync.cli.report import (
    FINE,
    PROBLEM,
    UNREACHABLE,
    Report,
    Table,
    as_text,
    finish,
    gist,
    many,
    printable,
    size,
)
from delta_sync.cli.run import PublicKey, checked_run, read_public_keys
from delta_sync.cli.timed_store import TimedStore
from delta_sync.fan_out import Copying, Line, Options, fan_out
from delta_sync.store.cache import MAX_BYTES, ObjectCache, default_folder
from delta_sync.store.open import shown_uri

SHOWN_SECONDS = 1.0  # between two looks at what there is to say
END_SECONDS = 30.0  # in which what is being written when a signal comes may end
Lines = Sequence[Line]


def mirror(
    source: Annotated[str, typer.Argument(metavar="SRC", callback=checked_run, help="The run to follow.")],
    destinations: Annotated[list[str], typer.Argument(metavar="DST...", help="Empty stores, or earlier copies.")],
    once: Annotated[bool, typer.Option("--once", help="Copy what is there now, and end.")] = False,
    from_anchor: Annotated[
        bool, typer.Option("--from-anchor", help="Into an empty DST: nothing older than the newest anchor.")
    ] = False,
    check: Annotated[bool, typer.Option("--check", help="Read the copy too, and write again what is damaged.")] = False,
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where objects lie on their way [~/.cache/delta-sync].")
    ] = None,
    cache_gib: Annotated[float, typer.Option(min=0, metavar="GIB", help="Most that is kept there.")] = MAX_BYTES
    / 2**30,
    poll: Annotated[float, typer.Option(min=0.01, help="Seconds between two looks at SRC.")] = 1.0,
    public_key: PublicKey = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what each DST lacks, and copy nothing.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON document; without --once one a line.")] = False,
) -> None:
    """Copy a run to other stores, object by object, each verified; go on where an earlier mirror ended.

    Follows the run until a signal ends it, or with --once copies what is there. Replicas follow a DST like SRC.
    Exits with 1 if a copy is not whole, with 3 if a store did not answer.
    """
    targets = {checked_run(uri): uri for uri in destinations}
    if shown_uri(source) in {shown_uri(uri) for uri in targets} or len(targets) < len(destinations):
        raise typer.BadParameter("SRC and all DST must differ", param_hint="DST")
    keys = read_public_keys(public_key)
    if dry_run:
        finish(as_json, lambda: look(source, list(targets)))
    objects = ObjectCache(cache or default_folder(), int(cache_gib * 2**30))

    def report() -> Report:
        options = Options(once, from_anchor, check, poll, keys)
        stop = threading.Event()
        with _ended_by_signals(stop):
            store = TimedStore(source)
            if not once:
                store.follow()
            copies = fan_out(store, {u: lambda u=u: TimedStore(u) for u in targets}, objects, options, stop)  # type: ignore[misc]
            return _report(source, _watch(copies, stop, _Shown(as_json) if not once else None), once)

    finish(as_json, report)


def _watch(copies: Sequence[Copying], stop: threading.Event, shown: _Shown | None) -> Lines:
    """Show what changes until all end, or a signal comes and what is being written ends or takes too long."""
    end = float("inf")
    while any(copy.is_alive() for copy in copies) and time.monotonic() < end:
        if shown:
            shown.update([copy.line() for copy in copies])
        if stop.wait(SHOWN_SECONDS if shown else 0.1):
            end = min(end, time.monotonic() + END_SECONDS)
            time.sleep(0.05)
    lines = [copy.line() for copy in copies]
    if shown:
        shown.update(lines)
    return lines


class _Shown:
    """Prints a destination's line when it says something new."""

    def __init__(self, as_json: bool) -> None:
        self._as_json = as_json
        self._last: dict[str, Line] = {}

    def update(self, lines: Lines) -> None:
        for line in lines:
            if (new := _news(line)) != self._last.get(line.uri):
                self._last[line.uri] = new
                text = as_text(_document(line)) if self._as_json else _sentence(line)
                typer.echo(text if self._as_json else printable(text))


def _news(line: Line) -> Line:
    """What of a line is worth another one: that a store fails still is not."""
    problems = tuple(map(gist, line.problems)) if line.state == "retrying" else line.problems
    return replace(line, tries=0, problems=problems)


def _sentence(line: Line) -> str:
    where = "no version" if line.version is None else f"version {line.version} of {line.newest}"
    text = f"{time.strftime('%H:%M:%S')} {shown_uri(line.uri)}: {line.state}, {where}, {_written(line)}"
    return f"{text}: {line.problems[0]}" if line.problems else text


def _written(line: Line) -> str:
    return f"{many(line.objects, 'object')}, {size(line.bytes)} written"


def _document(line: Line) -> dict[str, Any]:
    return asdict(line) | {"uri": shown_uri(line.uri), "time": time.time()}


def _report(source: str, lines: Lines, once: bool) -> Report:
    document: dict[str, object] = {}
    if once:
        document |= {"source": shown_uri(source), "destinations": [_document(line) for line in lines]}
    rows = [
        [shown_uri(line.uri), line.state, line.version or "-", line.newest or "-", line.objects, size(line.bytes)]
        for line in lines
    ]
    columns = ("destination", "state", ">version", ">of", ">objects", ">written")
    errors = [f"{shown_uri(line.uri)}: {problem}" for line in lines for problem in line.problems]
    parts = [Table(shown_uri(source), columns, rows)] if once else []
    return Report(document, parts, _exit_code(lines), errors)


def _exit_code(lines: Lines) -> int:
    states = {line.state for line in lines}
    if states == {"current"}:
        return FINE
    return UNREACHABLE if states <= {"current", "retrying"} else PROBLEM


@contextlib.contextmanager
def _ended_by_signals(stop: threading.Event) -> Iterator[None]:
    """SIGINT and SIGTERM end the mirror after the object being written; a second one ends the process."""

    def end(number: int, _: object) -> None:
        stop.set()
        signal.signal(number, signal.SIG_DFL)

    before = {number: signal.signal(number, end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
