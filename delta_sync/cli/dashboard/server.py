"""The page's server: a handful of fixed files and one stream of events, for this machine alone unless asked."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import socket
import sys
import time
from collections.abc import Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from urllib.parse import parse_qs, urlsplit

from delta_sync.cli.dashboard.live import LiveRun
from delta_sync.cli.dashboard.summary import WINDOWS
from delta_sync.cli.report import printable

PAGES = 32  # that may listen at once: each holds a thread
HEARTBEAT = 10.0  # seconds after which a silent stream says that it is there
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_HEADERS = {
    # Nothing but our own files runs or loads, and no other page may frame or read us.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}


class DashboardServer(ThreadingHTTPServer):
    """Serves a run's page at ``url``; OSError if the address can't be had. Port 0 takes a free one."""

    daemon_threads = True

    def __init__(self, live: LiveRun, host: str = "127.0.0.1", port: int = 0) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.live, self.host = live, host
        self.static = _static_files()
        super().__init__((host, port), _Handler)

    @property
    def url(self) -> str:
        """Where to point a browser."""
        name = f"[{self.host}]" if ":" in self.host else self.host
        return f"http://{name}:{self.server_address[1]}/"

    def handle_error(self, request: object, client_address: object) -> None:
        """A page that was closed while it was answered is nothing to speak of; anything else is one line."""
        error = sys.exception()
        if not isinstance(error, OSError):
            print(f"delta-sync: a page got no answer: {printable(repr(error))}", file=sys.stderr)

    def is_own(self, host: str | None) -> bool:
        """Whether a request means this server: a name that others chose may point here (DNS rebinding)."""
        try:
            name = urlsplit(f"//{host}").hostname if host else None
        except ValueError:
            return False
        if name is None:
            return False
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(name))  # an address needs no name, so nobody can have rebound it
        return name in ("localhost", self.host.lower())


class _Handler(BaseHTTPRequestHandler):
    server: DashboardServer
    server_version, sys_version = "delta-sync", ""
    timeout = 30  # seconds that a client may take to ask, or to take what it asked for

    def do_GET(self) -> None:
        try:
            url = urlsplit(self.path)
        except ValueError:  # such as "http://["
            self._refuse(HTTPStatus.BAD_REQUEST, "this is no address of a page")
            return
        window = parse_qs(url.query).get("last", ["all"])[-1]
        if not self.server.is_own(self.headers.get("Host")):
            self._refuse(HTTPStatus.MISDIRECTED_REQUEST, "this server is reached by its address or as localhost")
        elif url.path in self.server.static:
            self._answer(*self.server.static[url.path])
        elif url.path in ("/api/state", "/api/events") and window not in WINDOWS:
            self._refuse(HTTPStatus.BAD_REQUEST, f"last: one of {', '.join(WINDOWS)}")
        elif url.path == "/api/state":
            _, parts = self.server.live.sections(window, 0, 30.0)
            self._answer(_object({**parts, "now": json.dumps(time.time())}).encode(), "application/json")
        elif url.path == "/api/events":
            self._stream(window)
        else:
            self._refuse(HTTPStatus.NOT_FOUND, "there is no such page")

    do_HEAD = do_GET

    def _stream(self, window: str) -> None:
        live = self.server.live
        if not live.open_page(PAGES):
            self._refuse(HTTPStatus.SERVICE_UNAVAILABLE, f"{PAGES} pages are open already: close one")
            return
        try:
            with contextlib.suppress(OSError):  # the page was closed
                self._start(HTTPStatus.OK, "text/event-stream")
                if self.command == "GET":
                    self._send_events(window)
        finally:
            live.close_page()

    def _send_events(self, window: str) -> None:
        live, revision, sent = self.server.live, 0, dict[str, str]()
        self.wfile.write(b"retry: 1000\n\n")
        while not live.stopped:
            revision, parts = live.sections(window, revision, HEARTBEAT)
            new = {name: text for name, text in parts.items() if sent.get(name) != text}
            for name, text in new.items():
                self.wfile.write(f"event: {name}\ndata: {text}\n\n".encode())
            self.wfile.write(f"event: now\ndata: {time.time():.3f}\n\n".encode())
            sent |= new

    def _answer(self, body: bytes, kind: str) -> None:
        self._start(HTTPStatus.OK, kind, len(body))
        if self.command == "GET":
            self.wfile.write(body)

    def _refuse(self, status: HTTPStatus, why: str) -> None:
        body = f"{why}\n".encode()
        self._start(status, "text/plain", len(body))
        if self.command == "GET":
            self.wfile.write(body)

    def _start(self, status: HTTPStatus, kind: str, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", f"{kind}; charset=utf-8")
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if length is not None:
            self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing: a terminal is no access log."""


def _object(parts: Mapping[str, str]) -> str:
    """One JSON object of parts that are JSON already."""
    return "{" + ",".join(f"{json.dumps(name)}:{text}" for name, text in parts.items()) + "}"


def _static_files() -> dict[str, tuple[bytes, str]]:
    """Path -> (bytes, type) of every file of the page: nothing else can be asked for."""
    folder = files("delta_sync.cli.dashboard") / "static"
    found = {}
    for entry in folder.iterdir():
        kind = _TYPES.get("." + entry.name.rpartition(".")[2])
        if kind is not None:
            found[f"/{entry.name}"] = (entry.read_bytes(), kind)
    found["/"] = found["/index.html"]
    return found
