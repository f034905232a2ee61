"""Requests to the rollout server: a time-out on each, the API key on each, errors by what to do about them."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import requests
import urllib3

from delta_sync.bearer import bearer
from delta_sync.deadline import StillRunningError, within
from delta_sync.errors import DeltaSyncError, FormatError, NotFoundError, StoreError
from delta_sync.store.open import redact_uri
from trl_callback.sockets import CuttableTransport

CONNECT_TIMEOUT = 5.0
_BUSY = (408, 425, 429, 500, 502, 503, 504)
_MAX_BODY = 1 << 28  # bytes; the tensors of the largest models are a few million
_SHOWN = 400  # characters of a server's error body that go into ours


class ServerUnavailableError(StoreError):
    """The rollout server can't be reached or answers that it can't serve now: try again."""


def is_http(url: str) -> bool:
    """True for http:// and https:// with a host and, if any, a possible port."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, brackets that don't close
        return False


class CutError(DeltaSyncError):
    """This side has cut its connections to the server: nobody waits for the answer any more."""

    action = "stop"


class ServerUrl:
    """A server's base URL; what is shown of it has no user name, password or query. DeltaSyncError if it is none."""

    def __init__(self, url: str) -> None:
        if not is_http(url):
            raise DeltaSyncError(
                "URL of the rollout server", expected="http://HOST[:PORT] or https://HOST[:PORT]", got=redact_uri(url)
            )
        parts = urlsplit(url)
        self.base = url.rstrip("/")
        host = parts.hostname or ""
        netloc = f"{host}:{parts.port}" if parts.port else host
        self.shown = urlunsplit((parts.scheme, netloc, parts.path.rstrip("/"), "", ""))


class Server:
    """One rollout server spoken to over HTTP with JSON; FormatError for a key that no header can hold.

    Raises ServerUnavailableError (try again), NotFoundError (no such route), DeltaSyncError (refused) and
    FormatError (not JSON), and CutError once it is ``cut``; no message ever holds the key.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.url = ServerUrl(url)
        self._session = requests.Session()
        self._transport = CuttableTransport()
        for scheme in ("http://", "https://"):
            self._session.mount(scheme, self._transport)
        if api_key is not None:
            # As auth, not as a header: requests replaces an Authorization header by what ~/.netrc has for the host.
            self._session.auth = _Bearer(bearer(api_key))
        self._session.headers["Accept-Encoding"] = "identity"
        self._stuck: threading.Thread | None = None

    def get(self, path: str, *, timeout: float) -> Any:
        """GET a JSON document, all of it within ``timeout`` seconds."""
        return _json(self._send("GET", path, timeout=timeout), self._name(path))

    def post(self, path: str, body: dict[str, Any], *, timeout: float, headers: Mapping[str, str] | None = None) -> Any:
        """POST a JSON document and read one back."""
        return _json(self._send("POST", path, timeout=timeout, json=body, headers=headers), self._name(path))

    def check(self, path: str, *, timeout: float) -> None:
        """GET ``path`` and accept any body (a health route has none)."""
        self._send("GET", path, timeout=timeout)

    def close(self) -> None:
        """Close pooled connections."""
        self._session.close()

    def cut(self) -> None:
        """Break off what is running, from any thread, and let nothing more begin; the server sees nobody waiting."""
        self._transport.cut()

    def raise_if_cut(self) -> None:
        """Raise CutError once ``cut``."""
        if self._transport.is_cut:
            raise CutError(self.url.shown, expected="an open connection", got="one that this side has cut")

    def _name(self, path: str) -> str:
        return f"{self.url.shown}{path.partition('?')[0]}"

    def _send(self, method: str, path: str, *, timeout: float, **arguments: Any) -> _Answer:
        self.raise_if_cut()
        try:
            answer = self._answer(method, path, timeout, arguments)
        except (requests.RequestException, urllib3.exceptions.HTTPError) as error:
            self.raise_if_cut()
            raise self._unavailable(path, _reason(error, timeout)) from None  # its text holds the URL and a password
        except StillRunningError as error:  # requests bounds the time between two bytes only
            self._stuck = error.thread
            self.raise_if_cut()
            raise self._unavailable(path, f"no whole answer within {timeout:g} s") from None
        if answer.status == 200:
            return answer
        raise _refusal(self._name(path), answer)

    def _answer(self, method: str, path: str, timeout: float, arguments: dict[str, Any]) -> _Answer:
        stuck = self._stuck  # another thread of ours may come by here too
        if stuck is not None:  # at most one thread is left behind
            stuck.join(timeout)
            if stuck.is_alive():
                raise StillRunningError(stuck)
            if self._stuck is stuck:
                self._stuck = None
        limits = (min(CONNECT_TIMEOUT, timeout), timeout)
        url, name = f"{self.url.base}{path}", self._name(path)

        def ask() -> _Answer:
            with self._session.request(
                method, url, timeout=limits, allow_redirects=False, stream=True, **arguments
            ) as answer:
                return _read(answer, name)

        return within(timeout, ask)

    def _unavailable(self, path: str, got: str) -> ServerUnavailableError:
        remedy = "is the server running, and is nothing between here and there slow?"
        return ServerUnavailableError(self._name(path), expected="an answer", got=got, remedy=remedy)


@dataclass(frozen=True)
class _Answer:
    status: int
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode(errors="replace")


def _read(answer: requests.Response, name: str) -> _Answer:
    body = bytearray()
    for chunk in answer.raw.stream(1 << 16, decode_content=False):  # not unpacked: a small answer could be a huge one
        body += chunk
        if len(body) > _MAX_BODY:
            raise FormatError(name, expected=f"an answer of at most {_MAX_BODY} bytes", got="a longer one")
    return _Answer(answer.status_code, bytes(body))


class _Bearer(requests.auth.AuthBase):
    def __init__(self, header: str) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = self._header
        return request


def _reason(error: Exception, timeout: float) -> str:
    if isinstance(error, requests.ConnectTimeout):
        return f"no connection within {min(CONNECT_TIMEOUT, timeout):g} s"
    if isinstance(error, requests.Timeout | urllib3.exceptions.TimeoutError):
        return f"none within {timeout:g} s"
    if isinstance(error, requests.exceptions.SSLError):
        return "a TLS failure"
    if "refused" in str(error).lower():
        return "connection refused"
    return type(error).__name__


def _refusal(name: str, answer: _Answer) -> DeltaSyncError:
    status = answer.status
    said = f"HTTP {status}: {_excerpt(answer)}"
    if status in (401, 403):
        return DeltaSyncError(name, expected="access", got=f"HTTP {status}",
                              remedy="set api_key=… or VLLM_API_KEY to the server's --api-key")  # fmt: skip
    if status == 404:
        return NotFoundError(name, expected="this route", got=said)
    if status in _BUSY:
        return ServerUnavailableError(name, expected="HTTP 200", got=said)
    return DeltaSyncError(name, expected="HTTP 200", got=said)


def _excerpt(answer: _Answer) -> str:
    text = answer.text
    try:
        message = json.loads(text)["error"]["message"]
    except (ValueError, RecursionError, KeyError, TypeError):
        message = text
    return " ".join(str(message).split())[:_SHOWN]


def _json(answer: _Answer, name: str) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError):
        if answer.body.lstrip().startswith(b"<"):  # a proxy's, while what is behind it sleeps or starts
            raise ServerUnavailableError(name, expected="JSON", got=f"a web page: {_excerpt(answer)}") from None
        raise FormatError(name, expected="JSON", got=_excerpt(answer)) from None
