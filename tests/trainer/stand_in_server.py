"""A small real HTTP server on a free port whose answers a test decides: a stand-in for `vllm serve`, not vLLM."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, Any]
Route = Callable[[Any], Answer]


@dataclass
class StandInServer:
    """``routes["GET /health"] = lambda body: (status, json)``; what was asked is in ``requests``, with headers."""

    routes: dict[str, Route] = field(default_factory=dict)
    api_key: str | None = None
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)
    url: str = ""

    def answer(self, name: str, headers: dict[str, str], body: Any) -> Answer:
        self.requests.append((name, headers, body))
        guarded = self.api_key is not None and name != "GET /health"
        if guarded and headers.get("Authorization") != f"Bearer {self.api_key}":
            return 401, {"error": "Unauthorized"}
        route = self.routes.get(name)
        return route(body) if route else (404, {"detail": "Not Found"})


@contextmanager
def serving(server: StandInServer, port: int = 0) -> Iterator[StandInServer]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply("GET", None)

        def do_POST(self) -> None:
            self.reply("POST", json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def reply(self, method: str, body: Any) -> None:
            status, answer = server.answer(f"{method} {self.path.partition('?')[0]}", dict(self.headers), body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *args: Any) -> None:
            """Keep test output quiet."""

    connections: list[socket.socket] = []

    class Listener(ThreadingHTTPServer):
        daemon_threads = True

        def get_request(self) -> tuple[socket.socket, Any]:
            connection, address = super().get_request()
            connections.append(connection)
            return connection, address

    http = Listener(("127.0.0.1", port), Handler)
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        for connection in connections:  # kept-alive ones too, as if the process had ended
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        thread.join(10)
