"""``delta-sync pin``, ``unpin``, ``rollback`` and ``reload``: what an operator asks of serving replicas."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Annotated, Any

import typer

from delta_sync.cli.report import FINE, PROBLEM, UNREACHABLE, AsJson, Report, Table, finish, many
from delta_sync.cli.server import Answer, ask, checked_servers

ADMIN_KEY = "DELTA_SYNC_ADMIN_KEY"
AT_ONCE = 32  # servers that are asked at the same time

Servers = Annotated[
    list[str],
    typer.Option("--server", metavar="URL", help="A server, as http://HOST:PORT; may be given several times."),
]
Timeout = Annotated[float, typer.Option(min=1, max=3600, help="Seconds that each server may take.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Ask each server whether it could, and change nothing.")]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask.")]


def pin(
    server: Servers,
    version: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Go on to N first; else hold what is served.")
    ] = None,
    timeout: Timeout = 60.0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Hold servers at the version that they serve, or at a newer one. The admin key is DELTA_SYNC_ADMIN_KEY's."""
    _order(_Order("pin", server, version, timeout), as_json, dry_run)


def unpin(server: Servers, timeout: Timeout = 60.0, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Let servers follow the newest version again. The admin key is DELTA_SYNC_ADMIN_KEY's."""
    _order(_Order("unpin", server, None, timeout), as_json, dry_run)


def rollback(
    server: Servers,
    version: Annotated[int, typer.Option(min=1, metavar="N", help="The version to go back to.")],
    timeout: Timeout = 60.0,
    dry_run: DryRun = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Take servers back to an older version and hold them there. The admin key is DELTA_SYNC_ADMIN_KEY's."""
    if as_json and not (yes or dry_run):
        raise typer.BadParameter("nobody can be asked with --json: give --yes or --dry-run too", param_hint="--json")
    question = None if yes else f"Take {many(len(set(server)), 'server')} back to version {version}?"
    _order(_Order("rollback", server, version, timeout), as_json, dry_run, question)


def reload(server: Servers, timeout: Timeout = 60.0, dry_run: DryRun = False, as_json: AsJson = False) -> None:
    """Have servers compare all live memory with the bucket and take what differs. The admin key is as for pin."""
    _order(_Order("reload", server, None, timeout), as_json, dry_run)


@dataclass(frozen=True)
class _Order:
    action: str
    servers: Sequence[str]
    version: int | None
    timeout: float


def _order(order: _Order, as_json: bool, dry_run: bool, question: str | None = None) -> None:
    servers = checked_servers(order.servers)
    key = os.environ.get(ADMIN_KEY)
    if not key:
        remedy = f"export {ADMIN_KEY}=…, the one that the servers were started with"
        raise typer.BadParameter(f"{ADMIN_KEY} is not set: {remedy}", param_hint="environment")
    if question and not dry_run:
        typer.confirm(question, abort=True, err=True)

    def one(url: str) -> Answer:
        query = "" if order.version is None else f"?version={order.version}"
        method = "GET" if dry_run else "POST"  # a server whose release knows no dry run refuses the GET
        return ask(method, url, f"/delta_sync/{order.action}{query}", key, order.timeout)

    finish(as_json, lambda: _report(order, servers, _all(servers, one), dry_run))


def _all(servers: Sequence[str], one: Callable[[str], Answer]) -> list[Answer]:
    with ThreadPoolExecutor(min(AT_ONCE, len(servers))) as pool:
        return list(pool.map(one, servers))


def _report(order: _Order, servers: Sequence[str], answers: Sequence[Answer], dry_run: bool) -> Report:
    rows = [_row(order, answer, dry_run) for answer in answers]
    failed = [answer for answer in answers if answer.error is not None]
    document: dict[str, object] = {
        "action": order.action,
        "version": order.version,
        "dry_run": dry_run,
        "done": 0 if dry_run else len(answers) - len(failed),
        "failed": len(failed),
        "servers": rows,
    }
    code = FINE if not failed else UNREACHABLE if any(answer.unreachable for answer in failed) else PROBLEM
    cells = [[*("-" if row[name] is None else row[name] for name in _SHOWN)] for row in rows]
    columns = ("server", "result", "state", ">version", ">pinned", ">newest", "error")
    title = order.action if order.version is None else f"{order.action} {order.version}"
    return Report(document, [Table(title, columns, cells)], code)


_SHOWN = ("server", "result", "state", "serves", "pinned", "newest", "error")


def _row(order: _Order, answer: Answer, dry_run: bool) -> dict[str, Any]:
    """One server: what was done, and what it serves now as far as it said."""
    status = answer.status
    result = "failed" if answer.error is not None else f"would {order.action}" if dry_run else "done"
    return {
        "server": answer.server,
        "result": result,
        "state": status.get("state"),
        "serves": status.get("version"),
        "pinned": status.get("pinned"),
        "newest": status.get("newest_version"),
        "http_status": answer.code,
        "error": answer.error,
    }
