"""Requests to the rollout server: a time-out on each, the API key on each, errors by what to do about them."""

from __future__ import annotations

import json
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests

from delta_sync.errors import DeltaSyncError, FormatError, NotFoundError, StoreError

CONNECT_TIMEOUT = 5.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_SHOWN = 400  # characters of a server's error body that go into ours


class ServerUnavailableError(StoreError):
    """The rollout server can't be reached or answers that it can't serve now: try again."""


class ServerUrl:
    """A server's base URL; what is shown of it has no user name, password or query."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self.base = url.rstrip("/")
        host = parts.hostname or ""
        netloc = f"{host}:{parts.port}" if parts.port else host
        self.shown = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))


class Server:
    """One rollout server spoken to over HTTP with JSON.

    Raises ServerUnavailableError (try again), NotFoundError (no such route), DeltaSyncError (refused) and
    FormatError (not JSON); no message ever holds the key.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = ServerUrl(url)
        self._session = requests.Session()
        if api_key is not None:
            # As auth, not as a header: requests replaces an Authorization header by what ~/.netrc has for the host.
            self._session.auth = _Bearer(api_key)

    def get(self, path: str, *, timeout: float) -> Any:
        """GET a JSON document; ``timeout`` seconds between bytes."""
        return _json(self._send("GET", path, timeout=timeout), self._name(path))

    def post(self, path: str, body: dict[str, Any], *, timeout: float) -> Any:
        """POST a JSON document and read one back."""
        return _json(self._send("POST", path, timeout=timeout, json=body), self._name(path))

    def check(self, path: str, *, timeout: float) -> None:
        """GET ``path`` and accept any body (a health route has none)."""
        self._send("GET", path, timeout=timeout)

    def close(self) -> None:
        """Close pooled connections."""
        self._session.close()

    def _name(self, path: str) -> str:
        return f"{self.url.shown}{path.partition('?')[0]}"

    def _send(self, method: str, path: str, *, timeout: float, **arguments: Any) -> requests.Response:
        limits = (min(CONNECT_TIMEOUT, timeout), timeout)
        try:
            answer = self._session.request(
                method, f"{self.url.base}{path}", timeout=limits, allow_redirects=False, **arguments
            )
        except requests.RequestException as error:
            raise ServerUnavailableError(
                self._name(path), expected="an answer", got=_reason(error, timeout), remedy="is the server running?"
            ) from None  # the cause's text holds the URL with any password in it
        if answer.status_code == 200:
            return answer
        raise _refusal(self._name(path), answer)


class _Bearer(requests.auth.AuthBase):
    def __init__(self, key: str) -> None:
        self._key = key

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request


def _reason(error: requests.RequestException, timeout: float) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {min(CONNECT_TIMEOUT, timeout):g} s"
    if isinstance(error, requests.Timeout):
        return f"none within {timeout:g} s"
    if isinstance(error, requests.exceptions.SSLError):
        return "a TLS failure"
    if "refused" in str(error).lower():
        return "connection refused"
    return type(error).__name__


def _refusal(name: str, answer: requests.Response) -> DeltaSyncError:
    status = answer.status_code
    said = f"HTTP {status}: {_excerpt(answer)}"
    if status in (401, 403):
        return DeltaSyncError(name, expected="access", got=f"HTTP {status}",
                              remedy="set api_key=… or VLLM_API_KEY to the server's --api-key")  # fmt: skip
    if status == 404:
        return NotFoundError(name, expected="this route", got=said)
    if status in _BUSY:
        return ServerUnavailableError(name, expected="HTTP 200", got=said)
    return DeltaSyncError(name, expected="HTTP 200", got=said)


def _excerpt(answer: requests.Response) -> str:
    text = answer.text
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split())[:_SHOWN]


def _json(answer: requests.Response, name: str) -> Any:
    try:
        return answer.json()
    except ValueError:
        raise FormatError(name, expected="JSON", got=_excerpt(answer)) from None
