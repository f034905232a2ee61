"""GET /delta_sync/status, /delta_sync/ready, /delta_sync/tensors and /delta_sync/tensors/{name}."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_delta_plugin.api_key import KeyRing
from vllm_delta_plugin.compat import outputs, usage
from vllm_delta_plugin.compat.client import ask_engines
from vllm_delta_plugin.flag import PLUGIN
from vllm_delta_plugin.version_middleware import VersionMiddleware

_SECONDS, _SCAN_SECONDS = 30.0, 600.0  # the engine answers between two steps; a scan reads all weights


class DeltaSyncEndpoints:
    """vLLM endpoint plugin; needs no dev mode, checks the API key itself, works in every API server process."""

    name = PLUGIN
    required_tasks = None

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes and the middleware, inside vLLM's own; called once per API server."""
        outputs.install()
        usage.install()
        app.add_middleware(VersionMiddleware)
        app.add_api_route("/delta_sync/status", status, methods=["GET"])
        app.add_api_route("/delta_sync/ready", ready, methods=["GET"])
        app.add_api_route("/delta_sync/tensors", tensors, methods=["GET"])
        app.add_api_route("/delta_sync/tensors/{name:path}", tensor, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep what the routes need."""
        state.delta_sync_engine = engine_client
        state.delta_sync_keys = KeyRing(getattr(args, "api_key", None))


async def status(request: Request) -> Response:
    """The replica's status; with several engines that of the one furthest behind, and all under "engines"."""
    answers = await _ask(request, "delta_sync_status", timeout=_SECONDS)
    if isinstance(answers, Response):
        return answers
    return JSONResponse(_merge(answers))


async def ready(request: Request) -> Response:
    """200 while the weights served are proven, 503 while live memory failed its audit."""
    answers = await _ask(request, "delta_sync_status", timeout=_SECONDS)
    if isinstance(answers, Response):
        return answers
    state = _merge(answers)["state"]
    return JSONResponse({"state": state}, status_code=503 if state == "poisoned" else 200)


async def tensors(request: Request, scan: bool = False) -> Response:
    """Every tensor's dtype, shape and digest; ?scan=1 reads all live memory first."""
    answers = await _ask(request, "delta_sync_tensors", scan, timeout=_SCAN_SECONDS if scan else _SECONDS)
    return answers if isinstance(answers, Response) else JSONResponse(answers[0])


async def tensor(request: Request, name: str) -> Response:
    """One tensor's live bytes, row-major, little-endian; only where read-back is enabled."""
    answers = await _ask(request, "delta_sync_read_tensor", name, timeout=_SCAN_SECONDS)
    if isinstance(answers, Response):
        return answers
    answer = answers[0]
    if "error" in answer:
        return _error(404, answer["error"])
    shape = ",".join(str(d) for d in answer["shape"])
    headers = {"X-Dtype": answer["dtype"], "X-Shape": shape, "X-Version": str(answer["version"])}
    return Response(bytes(answer["data"]), media_type="application/octet-stream", headers=headers)


async def _ask(request: Request, method: str, *args: Any, timeout: float) -> list[Any] | Response:
    state = request.app.state
    keys: KeyRing | None = getattr(state, "delta_sync_keys", None)
    if keys is None:
        return _error(503, "the server is still starting")
    if not keys.accepts(request.headers.get("Authorization")):
        return JSONResponse({"error": "Unauthorized"}, status_code=401)
    if state.delta_sync_engine is None:
        return _error(404, "this server has no engine")
    try:
        answers = await ask_engines(state.delta_sync_engine, method, *args, timeout=timeout)
    except TimeoutError:
        return _error(504, f"the engine did not answer within {timeout:g} s")
    if any(answer is None for answer in answers):
        return _error(404, "this server follows no run: start it with --delta-sync URI")
    return answers


def _merge(answers: list[dict[str, Any]]) -> dict[str, Any]:
    def progress(answer: dict[str, Any]) -> tuple[bool, int]:
        return answer["state"] != "poisoned", -1 if answer["version"] is None else answer["version"]

    last = min(answers, key=progress)
    return last if len(answers) == 1 else {**last, "engines": answers}


def _error(code: int, text: str) -> JSONResponse:
    return JSONResponse({"error": text}, status_code=code)
