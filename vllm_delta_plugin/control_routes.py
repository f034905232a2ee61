"""POST /delta_sync/pin, unpin, rollback, reload (admin key) and hint (API key); GET of the first four is a dry run."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from delta_sync.errors import FormatError
from vllm_delta_plugin.asking import ask, ask_as_operator, merge, refuse
from vllm_delta_plugin.version_wish import read_timeout

_SECONDS = 30.0  # the engine answers between two steps
_COMMAND = 60.0  # seconds a command may take before its answer says that it goes on


def attach(app: FastAPI) -> None:
    """Add the routes."""
    for action in ("pin", "unpin", "rollback", "reload"):
        app.add_api_route(f"/delta_sync/{action}", _route(action), methods=["POST"], name=action)
        app.add_api_route(f"/delta_sync/{action}", _route(action, dry_run=True), methods=["GET"], name=f"may_{action}")
    app.add_api_route("/delta_sync/hint", hint, methods=["POST"])


def _route(action: str, *, dry_run: bool = False) -> Callable[..., Awaitable[Any]]:
    async def route(request: Request, version: int | None = None) -> Response:
        return await _command(action, request, version, dry_run)

    return route


async def _command(action: str, request: Request, version: int | None, dry_run: bool) -> Response:
    """Done on every engine, or could be: 200 and the status; else the worst engine's code and reason.

    ``?version=``: needed for rollback; pin holds what is served without one. The others take none.
    """
    if (version is None and action == "rollback") or (version is not None and action in ("unpin", "reload")):
        return refuse(400, f"{action} takes {'a' if action == 'rollback' else 'no'} version")
    try:
        seconds = read_timeout(request.headers, _COMMAND)
    except FormatError as error:
        return refuse(400, str(error))
    order = (action, version, seconds, dry_run)
    answers = await ask_as_operator(request, "delta_sync_control", *order, timeout=seconds + _SECONDS)
    if isinstance(answers, Response):
        return answers
    status = merge([answer["status"] for answer in answers])
    worst = max(answers, key=lambda answer: answer["code"])
    if worst["ok"]:
        return JSONResponse(status)
    return JSONResponse({"error": worst["error"], "status": status}, status_code=worst["code"])


async def hint(request: Request) -> Response:
    """Something new was published: look at once, rather than at the next poll."""
    answers = await ask(request, "delta_sync_hint", timeout=_SECONDS)
    return answers if isinstance(answers, Response) else JSONResponse(merge(answers))
