"""GET /delta_sync/status, ready, tensors and tensors/{name}; the POST routes are in control_routes.py."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response

from vllm_delta_plugin import control_routes
from vllm_delta_plugin.api_key import AdminKey, KeyRing
from vllm_delta_plugin.asking import ask, count, furthest_behind, merge, refuse
from vllm_delta_plugin.compat import outputs, usage
from vllm_delta_plugin.compat.client import count_engines
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.config import find_config
from vllm_delta_plugin.flag import PLUGIN
from vllm_delta_plugin.metrics_middleware import MetricsMiddleware
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
        app.add_middleware(MetricsMiddleware)
        app.add_api_route("/delta_sync/status", status, methods=["GET"])
        app.add_api_route("/delta_sync/ready", ready, methods=["GET"])
        control_routes.attach(app)
        app.add_api_route("/delta_sync/tensors", tensors, methods=["GET"])
        app.add_api_route("/delta_sync/tensors/{name:path}", tensor, methods=["GET"])

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Keep what the routes need; SeamError if vLLM's settings are elsewhere, so that no key is taken for none."""
        require(args, "additional_config", "api_key")
        if engine_client is not None:
            count_engines(engine_client)  # a client that cannot be asked is named now, not at the first question
        state.delta_sync_engine = engine_client
        config = find_config(args.additional_config)
        state.delta_sync_transition = config.transition if config else None
        state.delta_sync_keys = KeyRing(args.api_key)
        state.delta_sync_admin = AdminKey(getattr(args, "delta_sync_admin_key", None))


async def status(request: Request) -> Response:
    """The replica's status; with several engines that of the one furthest behind, and all under "engines"."""
    answers = await ask(request, "delta_sync_status", timeout=_SECONDS)
    if isinstance(answers, Response):
        return answers
    return JSONResponse(merge(answers))


async def ready(request: Request) -> Response:
    """200 while every engine serves proven weights, recent enough for --delta-sync-max-lag; else 503."""
    answers = await ask(request, "delta_sync_status", timeout=_SECONDS)
    if isinstance(answers, Response):
        return answers
    ready = all(answer["ready"] for answer in answers)
    last = merge(answers)
    told = {"ready": ready, **{name: last[name] for name in ("state", "version", "lag", "pinned")}}
    return JSONResponse(told, status_code=200 if ready else 503)


async def tensors(request: Request, scan: bool = False) -> Response:
    """Every tensor's dtype, shape and digest; ?scan=1 reads all live memory first.

    With several engines those of the one furthest behind, which "engine" names, and what all serve under "engines".
    """
    answers = await ask(request, "delta_sync_tensors", scan, timeout=_SCAN_SECONDS if scan else _SECONDS)
    if isinstance(answers, Response):
        return answers
    for answer in answers:
        if "error" in answer:
            return refuse(503, answer["error"])
    last = furthest_behind(answers)
    if len(answers) == 1:
        return JSONResponse(answers[last])
    each = [{name: answer[name] for name in ("version", "state_digest")} for answer in answers]
    return JSONResponse({**answers[last], "engine": last, "engines": each})


async def tensor(request: Request, name: str, engine: int = 0) -> Response:
    """One tensor's live bytes on one engine, row-major, little-endian; only where read-back is enabled."""
    answers = await ask(request, "delta_sync_read_tensor", name, timeout=_SCAN_SECONDS, only=engine)
    if isinstance(answers, Response):
        return answers
    answer = answers[0]
    if "error" in answer:
        return refuse(404, answer["error"])
    shape = ",".join(str(d) for d in answer["shape"])
    headers = {"X-Dtype": answer["dtype"], "X-Shape": shape, "X-Version": str(answer["version"])}
    headers |= {"X-Engine": str(engine), "X-Engines": str(count(request))}
    return Response(bytes(answer["data"]), media_type="application/octet-stream", headers=headers)
