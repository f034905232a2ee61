"""One request to a serving replica: bounded in time and size, no redirects, and no key in what is shown."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import HTTPRedirectHandler, Request, build_opener

import typer

from delta_sync.bearer import bearer
from delta_sync.deadline import StillRunningError, within
from delta_sync.store.open import redact_uri

BODY_BYTES = 64 * 1024**2
SLACK = 35.0  # seconds beyond its own deadline in which a server says that it has passed
_AGAIN = (408, 425, 429, 500, 502, 503, 504)


@dataclass(frozen=True)
class Answer:
    """What a server said: its JSON, or why there is none. ``unreachable``: another try may go better."""

    server: str
    code: int | None
    body: dict[str, Any] = field(default_factory=dict)
    error: str | None = None
    unreachable: bool = False

    @property
    def status(self) -> dict[str, Any]:
        """The replica's status, whether the answer is one or holds one beside an error; empty if neither."""
        inner = self.body.get("status")
        return inner if isinstance(inner, dict) else self.body if "state" in self.body else {}


def checked_servers(urls: Sequence[str]) -> list[str]:
    """Each URL once, in the order given; one that is none, or holds a password, is wrong usage."""
    for url in urls:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:
            parts, good = urlsplit(""), False
        if not good or parts.username or parts.password or parts.query or parts.fragment:
            got = redact_uri(url)
            raise typer.BadParameter(f"expected http://HOST:PORT without a password, got {got}", param_hint="--server")
    return list(dict.fromkeys(url.rstrip("/") for url in urls))


def ask(
    method: str,
    server: str,
    path: str,
    key: str | None,
    timeout: float,
    body: dict[str, Any] | None = None,
    **more: str,
) -> Answer:
    """Send one request and wait ``timeout`` seconds, and a little more; never raises for what a server does.

    FormatError for a key that can't be sent.
    """
    headers = {"x-delta-sync-timeout": f"{timeout:g}", "Content-Type": "application/json", **more}
    if key:
        headers["Authorization"] = bearer(key)
    data = None if method == "GET" else json.dumps(body or {}).encode()
    request = Request(f"{server}{path}", data, headers, method=method)
    try:
        code, raw = within(timeout + SLACK, lambda: _send(request, timeout + SLACK))
    except StillRunningError:
        return Answer(server, None, error=f"no whole answer within {timeout + SLACK:g} s", unreachable=True)
    except (URLError, OSError, http.client.HTTPException) as error:
        return Answer(server, None, error=_reason(error), unreachable=True)
    except ValueError:  # of a host that is no name, say; its text may hold any header
        return Answer(server, None, error="a request that cannot be sent: is the URL right?")
    return _read(server, code, raw)


class _NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *args: Any, **more: Any) -> None:
        """The key is for the server that was named, and nobody else."""


def _send(request: Request, timeout: float) -> tuple[int, bytes]:
    try:
        with build_opener(_NoRedirects).open(request, timeout=timeout) as answer:
            return answer.status, answer.read(BODY_BYTES)
    except HTTPError as error:
        with error:
            return error.code, error.read(BODY_BYTES)


def _read(server: str, code: int, raw: bytes) -> Answer:
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        body = None
    if code == 200:
        if isinstance(body, dict):
            return Answer(server, code, body)
        return Answer(server, code, error="an answer that is no JSON object: is this the server's own URL?")
    document = body if isinstance(body, dict) else {}
    return Answer(server, code, document, f"HTTP {code}: {_said(document, raw, code)}", code in _AGAIN)


def _said(document: dict[str, Any], raw: bytes, code: int) -> str:
    said = document.get("error")
    if isinstance(said, dict):
        said = said.get("message")
    text = str(said) if said else " ".join(raw[:200].decode(errors="replace").split()) or "no reason given"
    remedy = {
        401: "DELTA_SYNC_ADMIN_KEY (of parity VLLM_API_KEY) must be the server's",
        404: "is it started with --delta-sync and a key?",
        405: "its release knows no dry run",
    }
    return f"{text}; {remedy[code]}" if code in remedy else text


def _reason(error: Exception) -> str:
    reason = getattr(error, "reason", error)
    if isinstance(reason, TimeoutError | socket.timeout):
        return "no answer in time"
    if isinstance(reason, ConnectionRefusedError):
        return "connection refused"
    return f"{type(reason).__name__}: {reason}"
