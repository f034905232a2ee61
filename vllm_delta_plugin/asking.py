"""How a route asks the engines: the key first, then all of them, then one answer out of theirs."""

from __future__ import annotations

from typing import Any

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from vllm_delta_plugin.api_key import AdminKey, KeyRing
from vllm_delta_plugin.compat.client import DEAD, EngineDeadError, ask_engines, ask_one, count_engines


async def ask(
    request: Request, method: str, *args: Any, timeout: float, only: int | None = None
) -> list[Any] | Response:
    """Every engine's answer, or the error for a client without key, a server without engine, an engine too busy.

    ``only``: the answer of this engine alone.
    """
    state = request.app.state
    keys: KeyRing | None = getattr(state, "delta_sync_keys", None)
    if keys is None:
        return refuse(503, "the server is still starting")
    authorization = request.headers.get("Authorization")
    if not keys.accepts(authorization) and not state.delta_sync_admin.accepts(authorization):
        return refuse(401, "Unauthorized")
    return await _ask(request, method, *args, timeout=timeout, only=only)


async def ask_as_operator(request: Request, method: str, *args: Any, timeout: float) -> list[Any] | Response:
    """The same for those who know the admin key; 404 while none is set."""
    admin: AdminKey | None = getattr(request.app.state, "delta_sync_admin", None)
    if admin is None:
        return refuse(503, "the server is still starting")
    if not admin.is_set:
        return refuse(404, "control is off: start with DELTA_SYNC_ADMIN_KEY or --delta-sync-admin-key")
    if not admin.accepts(request.headers.get("Authorization")):
        return refuse(401, "Unauthorized")
    return await _ask(request, method, *args, timeout=timeout)


def count(request: Request) -> int:
    """How many engines are asked, 0 while there is none."""
    engine = getattr(request.app.state, "delta_sync_engine", None)
    return 0 if engine is None else count_engines(engine)


async def _ask(
    request: Request, method: str, *args: Any, timeout: float, only: int | None = None
) -> list[Any] | Response:
    engine = request.app.state.delta_sync_engine
    if engine is None:
        return refuse(404, "this server has no engine")
    if only is not None and not 0 <= only < (engines := count_engines(engine)):
        return refuse(404, f"engine {only}: this server has {engines}, counted from 0")
    try:
        if only is None:
            answers = await ask_engines(engine, method, *args, timeout=timeout)
        else:
            answers = [await ask_one(engine, only, method, *args, timeout=timeout)]
    except TimeoutError:
        return refuse(504, f"the engine did not answer within {timeout:g} s")
    except EngineDeadError:
        return refuse(503, DEAD)
    if any(answer is None for answer in answers):
        return refuse(404, "this server follows no run: start it with --delta-sync URI")
    return answers


def merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    """The status of the engine furthest behind, and all under "engines" if there are several."""
    last = answers[furthest_behind(answers)]
    return last if len(answers) == 1 else {**last, "engines": answers}


def furthest_behind(answers: list[dict[str, Any]]) -> int:
    """Which engine's answer counts for all: of unproven weights, else of the oldest version, else with a refusal."""

    def progress(index: int) -> tuple[bool, int, bool]:
        answer = answers[index]
        version = -1 if answer["version"] is None else answer["version"]
        return answer.get("state") != "poisoned", version, answer.get("refusal") is None

    return min(range(len(answers)), key=progress)


def refuse(code: int, text: str) -> JSONResponse:
    """An error of one of our routes."""
    return JSONResponse({"error": text}, status_code=code)
