"""A Wordle environment server that speaks the OpenEnv protocol and starts without any network.

    python -m examples.wordle.env_server --port 8000

The WebSocket /ws holds one session per connection, at most MAX_CONCURRENT_ENVS of them at once.
The plain HTTP routes are stateless, as OpenEnv's are: each request plays on a fresh game.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from fastapi import Body, FastAPI, WebSocket, WebSocketDisconnect
from pydantic import BaseModel, ValidationError

from examples.wordle.protocol import (
    INCOMING,
    CloseMessage,
    Incoming,
    ResetMessage,
    ResetRequest,
    StepMessage,
    StepRequest,
    StepResult,
    WordleAction,
    WordleObservation,
    WordleState,
    error_reply,
    observation_reply,
    state_reply,
)
from examples.wordle.session import Session

DEFAULT_SESSIONS = 64  # a GRPO run opens one session per completion of a batch; OpenEnv's default of 8 is soon full


def create_app(max_sessions: int) -> FastAPI:
    """The ASGI app; `max_sessions` WebSocket sessions at most (one past it is told CAPACITY_REACHED and closed)."""
    if max_sessions < 1:
        raise ValueError(f"max_sessions: expected >= 1, got {max_sessions}. Remedy: set MAX_CONCURRENT_ENVS")
    app = FastAPI(title="Wordle", description="An OpenEnv-protocol Wordle environment.")
    _add_http_routes(app)
    active: set[WebSocket] = set()

    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        await socket.accept()
        if len(active) >= max_sessions:
            await socket.send_json(_capacity(len(active), max_sessions))
            await socket.close()
            return
        active.add(socket)
        try:
            await _converse(socket, Session())
        except WebSocketDisconnect:
            return  # the player left while an answer was on its way; the session ends with the connection
        finally:
            active.discard(socket)

    return app


def _add_http_routes(app: FastAPI) -> None:
    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "healthy"}

    @app.get("/metadata")
    def metadata() -> dict[str, Any]:
        return {
            "name": "Wordle",
            "description": "Guess a five-letter word in six attempts.",
            "readme_content": None,
            "version": "1.0.0",
            "author": None,
            "documentation_url": None,
        }

    @app.get("/schema")
    def schema() -> dict[str, Any]:
        parts: dict[str, type[BaseModel]] = {
            "action": WordleAction,
            "observation": WordleObservation,
            "state": WordleState,
        }
        return {name: model.model_json_schema() for name, model in parts.items()}

    @app.post("/reset")
    def reset(request: ResetRequest = Body(default_factory=ResetRequest)) -> StepResult:  # noqa: B008
        return Session().reset(request.seed, request.episode_id)

    @app.post("/step")
    def step(request: StepRequest) -> StepResult:
        return Session().step(request.action)

    @app.get("/state")
    def state() -> dict[str, Any]:
        return WordleState().model_dump(include={"episode_id", "step_count"})


def _capacity(active: int, limit: int) -> dict[str, Any]:
    message = f"Server at capacity: {active}/{limit} sessions. Raise MAX_CONCURRENT_ENVS or try again later."
    return error_reply(message, "CAPACITY_REACHED", active_sessions=active, max_sessions=limit)


async def _converse(socket: WebSocket, session: Session) -> None:
    while True:
        frame = await socket.receive()
        if frame["type"] == "websocket.disconnect":
            return
        incoming = _parse(frame.get("text") or frame.get("bytes") or b"")
        if isinstance(incoming, CloseMessage):
            await socket.close()
            return
        await socket.send_json(incoming if isinstance(incoming, dict) else _answer(incoming, session))


def _parse(frame: str | bytes) -> Incoming | dict[str, Any]:
    """The message, or the error reply to send back."""
    try:
        return INCOMING.validate_json(frame)
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)
        if problems[0]["type"] == "json_invalid":
            return error_reply(problems[0]["msg"], "INVALID_JSON")
        if problems[0]["type"] in ("union_tag_invalid", "union_tag_not_found"):
            return error_reply("Unknown message type; expected reset, step, state or close", "UNKNOWN_TYPE")
        return error_reply("Invalid message", "VALIDATION_ERROR", errors=problems)


def _answer(incoming: Incoming, session: Session) -> dict[str, Any]:
    if isinstance(incoming, ResetMessage):
        return observation_reply(session.reset(incoming.data.seed, incoming.data.episode_id))
    if isinstance(incoming, StepMessage):
        return observation_reply(session.step(incoming.data))
    return state_reply(session.state)


def sessions_from_environment() -> int:
    value = os.environ.get("MAX_CONCURRENT_ENVS", str(DEFAULT_SESSIONS))
    if not value.isdigit():
        raise SystemExit(f"MAX_CONCURRENT_ENVS: expected a positive integer, got {value!r}")
    return int(value)


def main() -> None:
    import uvicorn

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    args = parser.parse_args()
    uvicorn.run(create_app(sessions_from_environment()), host=args.host, port=args.port, log_level="warning")


if __name__ == "__main__":
    main()
