"""Waiting until every engine serves the version a request asks for, and the answers if that can't be."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse

from delta_sync.errors import FormatError
from vllm_delta_plugin.compat.client import DEAD, EngineDeadError, ask_engines
from vllm_delta_plugin.request_versions import RequestVersions
from vllm_delta_plugin.version_wish import VersionWish

_ANSWER = 30.0  # seconds an engine may take for a long step before it looks at a question
_RETRY = 1  # seconds
DRAIN_TIMEOUT = 90.0  # seconds a new request waits for running ones to end, unless its header says otherwise


async def let_in(state: Any, wish: VersionWish | None, patience: float) -> JSONResponse | None:
    """None once a request may go on to the engine; ``patience``: seconds it will wait for running requests to end."""
    try:
        return await _let_in(state, wish, patience)
    except EngineDeadError:
        return refuse(503, "dead", DEAD, wish=wish)


async def _let_in(state: Any, wish: VersionWish | None, patience: float) -> JSONResponse | None:
    if wish is not None and (refusal := await wait_for_version(state, wish)) is not None:
        return refusal
    if getattr(state, "delta_sync_transition", None) != "sync":
        return None
    try:
        entered = await ask_engines(state.delta_sync_engine, "delta_sync_enter", patience, timeout=patience + _ANSWER)
    except TimeoutError:
        return refuse(425, "no_answer", "the engine did not answer in time", retry=_RETRY)
    if all(entered):
        return None
    text = f"running requests end before new weights come; not done after {patience:g} s"
    return refuse(425, "draining", text, retry=_RETRY)


async def wait_for_version(state: Any, wish: VersionWish) -> JSONResponse | None:
    """None once a request with this wish may go on; else 409 (can't come true here) or 425 (not in time)."""
    engine = getattr(state, "delta_sync_engine", None)
    if engine is None:
        return refuse(503, "starting", "the server is still starting", retry=_RETRY)
    try:
        replies = await ask_engines(engine, "delta_sync_status", timeout=_ANSWER)
        if any(reply is None for reply in replies):
            return refuse(409, "not_following", "this server follows no run: start it with --delta-sync URI")
        if not _reached(replies, wish) and not _hopeless(replies, wish):
            timeout = wish.timeout + _ANSWER
            replies = await ask_engines(engine, "delta_sync_wait", wish.version, wish.timeout, timeout=timeout)
    except TimeoutError:
        return refuse(425, "no_answer", "the engine did not answer in time", wish=wish, retry=_RETRY)
    if _reached(replies, wish):
        return None
    if hopeless := _hopeless(replies, wish):
        return refuse(409, *hopeless, wish=wish, replies=replies)
    text = f"version {wish.version} is not served yet, after {wish.timeout:g} s"
    return refuse(425, "not_yet", text, wish=wish, replies=replies, retry=_RETRY)


def _reached(replies: list[dict[str, Any]], wish: VersionWish) -> bool:
    return all(wish.allows(reply["version"]) for reply in replies)


def _hopeless(replies: list[dict[str, Any]], wish: VersionWish) -> tuple[str, str] | None:
    """Reason and text if no waiting helps."""
    for reply in replies:
        if wish.exact and (reply["version"] or 0) > wish.version:
            return "passed", f"version {wish.version} is not served any more, but {reply['version']}"
        if reply["pinned"] is not None and not wish.allows(reply["pinned"]):
            return "pinned", f"this replica is held at version {reply['pinned']} until it is unpinned"
    return None


def changed(versions: RequestVersions) -> JSONResponse:
    """The answer had tokens by a version that was not asked for."""
    wish = versions.wish
    asked = f"{wish.header} {wish.version}" if wish else "any version"
    text = f"weights changed while this request ran: asked for {asked}, got {versions.header}"
    return refuse(409, "changed", text, wish=wish, usage=versions.to_usage())


def bad_header(error: FormatError) -> JSONResponse:
    """A header that can't be read."""
    return refuse(400, "bad_header", str(error))


def refuse(
    code: int,
    reason: str,
    text: str,
    *,
    wish: VersionWish | None = None,
    replies: list[dict[str, Any]] | None = None,
    usage: dict[str, Any] | None = None,
    retry: int | None = None,
) -> JSONResponse:
    """An error in the shape of the OpenAI API, with what a program needs under "delta_sync"."""
    facts: dict[str, Any] = {"reason": reason}
    if wish is not None:
        facts |= {"wanted": wish.version, "exact": wish.exact}
    if replies is not None:
        facts |= {"served": [r["version"] for r in replies], "newest": max((r["newest_version"] or 0) for r in replies)}
    if usage is not None:
        facts |= usage
    error = {"message": text, "type": "DeltaSyncError", "param": wish.header if wish else None, "code": code}
    headers = None if retry is None else {"Retry-After": str(retry)}
    return JSONResponse({"error": error, "delta_sync": facts}, status_code=code, headers=headers)
