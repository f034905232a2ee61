"""POST /delta_sync/pin, unpin, rollback, reload (admin key) and hint (API key); GET of the first four is a dry run."""

from __future__ import annotations

import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from delta_sync.errors import FormatError
from vllm_delta_plugin.asking import ask, ask_as_operator, count, merge, refuse
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
    if version is not None and version < 1:  # 0 is what metrics call the checkpoint's own weights, which nobody kept
        return refuse(400, f"{action} takes a version from 1 on, got {version}: 1 is the run's first")
    try:
        seconds = read_timeout(request.headers, _COMMAND)
    except FormatError as error:
        return refuse(400, str(error))
    outcome = await _obey(request, action, version, seconds, dry_run)
    if isinstance(outcome, Response):
        return outcome
    status = merge([answer["status"] for answer in outcome.answers])
    worst = max(outcome.answers, key=lambda answer: answer["code"])
    if worst["ok"]:
        return JSONResponse(status)
    return JSONResponse({"error": outcome.error, "status": status}, status_code=worst["code"])


@dataclass(frozen=True)
class _Outcome:
    """Every engine's answer, to the command or, if that was not ``begun``, to whether it could be done."""

    answers: list[dict[str, Any]]
    begun: bool

    @property
    def error(self) -> str:
        """What went wrong; of several engines on which, and whether others did it all the same."""
        if len(self.answers) == 1:
            return str(self.answers[0]["error"])
        said = [f"engine {index}: {answer['error']}" for index, answer in enumerate(self.answers) if not answer["ok"]]
        done = [str(index) for index, answer in enumerate(self.answers) if answer["ok"] and self.begun]
        return "; ".join([*said, f"done on engine {', '.join(done)}" if done else "nothing was done"])


async def _obey(
    request: Request, action: str, version: int | None, seconds: float, dry_run: bool
) -> _Outcome | Response:
    """None of several engines does anything before all of them say that they could."""
    deadline = time.monotonic() + seconds

    async def order(version: int | None, *, dry_run: bool) -> _Outcome | Response:
        left = max(0.0, deadline - time.monotonic())
        words = (action, version, left, dry_run, uuid.uuid4().hex)
        answers = await ask_as_operator(request, "delta_sync_control", *words, timeout=left + _SECONDS)
        return answers if isinstance(answers, Response) else _Outcome(answers, not dry_run)

    if dry_run or count(request) > 1:
        outcome = await order(version, dry_run=True)
        if dry_run or isinstance(outcome, Response) or not all(answer["ok"] for answer in outcome.answers):
            return outcome
    outcome = await order(version, dry_run=False)
    if action == "pin" and isinstance(outcome, _Outcome):
        held = {answer["status"]["pinned"] for answer in outcome.answers if answer["ok"]}
        if len(held) > 1:  # each at what it served just then: the others go on to the newest of these
            return await order(max(held), dry_run=False)
    return outcome


async def hint(request: Request) -> Response:
    """Something new was published: look at once, rather than at the next poll."""
    answers = await ask(request, "delta_sync_hint", timeout=_SECONDS)
    return answers if isinstance(answers, Response) else JSONResponse(merge(answers))
