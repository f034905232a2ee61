"""An HTTP proxy in front of a real server that counts requests and spoils those that a test chooses."""

from __future__ import annotations

import contextlib
import http.client
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

HOP_BY_HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "te", "trailer", "upgrade"}
WRITES = ("PUT", "POST", "DELETE")


@dataclass(frozen=True)
class Request:
    method: str
    path: str  # with the query
    headers: Mapping[str, str]


@dataclass
class Fault:
    """What happens to one request.

    ``status``: answered so, with ``code`` in an S3 error document, without asking the server (after it, if ``after``).
    ``drop``: no answer, before or ``after`` the server did what was asked. ``hang``: seconds of silence at that point.
    ``truncate``: only so many bytes of the answer's body. ``flip``: one bit of its body is another.
    ``strip`` and ``add``: request headers that the server does not see, or sees besides.
    ``call``: called before the server is asked, or after, and before it is answered.
    """

    status: int | None = None
    code: str = ""
    message: str = "injected"
    after: bool = False
    drop: bool = False
    hang: float = 0.0
    truncate: int | None = None
    flip: bool = False
    strip: tuple[str, ...] = ()
    add: Mapping[str, str] = field(default_factory=dict)
    call: Callable[[], object] | None = None


Rule = Callable[[Request], Fault | None]


@dataclass
class FaultProxy:
    """``with FaultProxy(url) as proxy``: serves at ``proxy.url``; ``proxy.rule`` decides about each request."""

    upstream: str
    rule: Rule | None = None
    requests: list[Request] = field(default_factory=list)
    creating: threading.Lock = field(default_factory=threading.Lock)

    def __enter__(self) -> FaultProxy:
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def counts(self) -> dict[str, int]:
        """Requests since the last ``requests.clear()``, by method."""
        methods = [request.method for request in list(self.requests)]
        return {method: methods.count(method) for method in sorted(set(methods))}

    def fail_next(self, fault: Fault, times: int = 1, where: Callable[[Request], bool] = lambda _: True) -> None:
        """Spoil the next ``times`` requests for which ``where`` holds."""
        left = [times]
        lock = threading.Lock()

        def rule(request: Request) -> Fault | None:
            with lock:
                if not left[0] or not where(request):
                    return None
                left[0] -= 1
                return fault

        self.rule = rule


def stripping(*headers: str) -> Rule:
    """A server that does not know these request headers."""
    return lambda _: Fault(strip=headers)


def sometimes(share: float, seed: int, faults: list[Fault], counted: dict[str, int]) -> Rule:
    """One of ``faults`` at a share of all requests; ``counted`` says how often each came."""
    source, lock = random.Random(seed), threading.Lock()

    def rule(_: Request) -> Fault | None:
        with lock:
            if source.random() >= share:
                return None
            fault = source.choice(faults)
            name = fault.code or ("drop" if fault.drop else "truncate" if fault.truncate is not None else "flip")
            name += " after it was done" if fault.after else ""
            counted[name] = counted.get(name, 0) + 1
            return fault

    return rule


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """Clients that hang up are what the tests are about."""


def _handler(proxy: FaultProxy) -> type[BaseHTTPRequestHandler]:
    address = urlsplit(proxy.upstream)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.upstream = http.client.HTTPConnection(address.hostname or "", address.port, timeout=120)

        def finish(self) -> None:
            self.upstream.close()
            with contextlib.suppress(OSError):
                super().finish()

        def log_message(self, *_: object) -> None:
            pass

        def fails(self, fault: Fault) -> bool:
            """Do what the fault says; whether the client got its answer, or none, by that."""
            time.sleep(fault.hang)
            if fault.call:
                fault.call()
            if fault.drop:
                self.hang_up()
            elif fault.status:
                self.refuse(fault)
            return fault.drop or bool(fault.status)

        def handle_any(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            request = Request(self.command, self.path, dict(self.headers.items()))
            proxy.requests.append(request)
            fault = (proxy.rule and proxy.rule(request)) or Fault()
            if not fault.after and self.fails(fault):
                return None
            status, headers, content = self.ask(body, fault)
            if fault.after and self.fails(fault):
                return None
            if fault.flip and content:
                content = content[:-1] + bytes([content[-1] ^ 1])
            return self.answer(status, headers, content, fault.truncate)

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_any

        def ask(self, body: bytes, fault: Fault) -> tuple[int, list[tuple[str, str]], bytes]:
            dropped = HOP_BY_HOP | {name.lower() for name in fault.strip}
            headers = {name: value for name, value in self.headers.items() if name.lower() not in dropped}
            headers |= {**fault.add, "Content-Length": str(len(body))}
            conditional = any(name.lower() == "if-none-match" for name in headers)
            with proxy.creating if conditional else contextlib.nullcontext():  # moto looks, then writes
                return self.forward(body, headers)

        def forward(self, body: bytes, headers: dict[str, str]) -> tuple[int, list[tuple[str, str]], bytes]:
            try:
                self.upstream.request(self.command, self.path, body, headers)
                response = self.upstream.getresponse()
            except (http.client.HTTPException, OSError):  # the server closed an idle connection
                self.upstream.close()
                self.upstream.request(self.command, self.path, body, headers)
                response = self.upstream.getresponse()
            length = response.getheader("Content-Length") if self.command == "HEAD" else None
            content = response.read()
            found = [(name, value) for name, value in response.getheaders() if name.lower() not in HOP_BY_HOP]
            found.append(("Content-Length", length or str(len(content))))
            return response.status, found, content

        def answer(self, status: int, headers: list[tuple[str, str]], content: bytes, truncate: int | None) -> None:
            self.send_response_only(status)
            for name, value in headers:
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else content[:truncate])
            if truncate is not None:
                self.hang_up()

        def refuse(self, fault: Fault) -> None:
            document = f"<Error><Code>{fault.code}</Code><Message>{fault.message}</Message></Error>".encode()
            content = b"" if self.command == "HEAD" else document
            self.answer(fault.status or 500, [("Content-Length", str(len(content)))], content, None)

        def hang_up(self) -> None:
            self.close_connection = True
            with contextlib.suppress(OSError):
                self.wfile.flush()
                self.connection.shutdown(socket.SHUT_RDWR)

    return Handler
