"""The HTTP glue: a server in threads of this process, its faults, and a count of what was asked."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from helpers.hub.api import HubApi
from helpers.hub.buckets import Bucket
from helpers.hub.cas import Cas
from helpers.hub.faults import Fault, Faults, flipped
from helpers.hub.wire import Answer, Request

WRITE_TOKEN, READ_TOKEN = "hf_test_write", "hf_test_read"


class TestHub:
    """A Hub on a free port of an address of this machine, as a context manager; point HF_ENDPOINT at ``url``."""

    __test__ = False  # it is no test case

    def __init__(self, port: int = 0, *, host: str = "127.0.0.1", page: int = 100, seed: int = 0) -> None:
        self.faults = Faults(seed)
        self.cas = Cas()
        self.api = HubApi(self.cas, {WRITE_TOKEN: "write", READ_TOKEN: "read"}, page)
        self.asked: list[tuple[str, str]] = []  # (kind, "METHOD path"), in order
        self.requests: list[Request] = []  # the same, whole, but for the storage's
        self.quota: dict[str, int] = {}  # requests of a kind that are left before 429
        self._server = _Server((host, port), _handler(self))
        self.url = f"http://{host}:{self._server.server_port}"

    def __enter__(self) -> TestHub:
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.api.closing.set()
        self.drop_feeds()
        self._server.shutdown()
        self._server.server_close()

    def counts(self) -> Counter[str]:
        """How many requests of each kind came since the start or the last ``forget``."""
        return Counter(kind for kind, _ in list(self.asked))

    def forget(self) -> None:
        self.asked.clear()
        self.requests.clear()

    def reset(self) -> None:
        """No faults, no quota, nothing counted; buckets and their content stay."""
        self.faults.clear()
        self.quota.clear()
        self.api.serves_events = True
        self.forget()

    def drop_feeds(self) -> None:
        """End every event stream without a word, as a restart of the Hub does."""
        ended, self.api.feeds_end = self.api.feeds_end, threading.Event()
        ended.set()

    def new_bucket(self, bucket_id: str, *, private: bool = False) -> str:
        self.api.buckets[bucket_id] = Bucket(bucket_id, private)
        return bucket_id

    def answer(self, request: Request) -> Answer | None:
        """What to send, or None to close the connection instead."""
        kind = kind_of(request.path)
        self.asked.append((kind, request.line))
        if kind != "cas":
            self.requests.append(request)
        if self.quota.get(kind, 1) <= 0:
            return Answer(429, b"", {"RateLimit": f'"{kind}";r=0;t=1'})
        if kind in self.quota:
            self.quota[kind] -= 1
        fault = self.faults.pick(request)
        if fault and (early := self._early(fault)) is not _CARRY_ON:
            return early
        answer = self.cas.answer(request) if kind == "cas" else self.api.answer(request, fault)
        if fault and fault.kind == "flip":
            return flipped(answer)
        return _hang_up(fault) if fault and fault.kind == "drop after" else answer

    def _early(self, fault: Fault) -> Answer | object | None:
        if fault.kind == "status":
            return Answer(fault.status, fault.text.encode() or b"injected", dict(fault.headers))
        if fault.kind == "drop":
            return _hang_up(fault)
        if fault.kind in ("delay", "stall"):
            self.api.closing.wait(fault.seconds)
            return None if fault.kind == "stall" else _CARRY_ON
        return _CARRY_ON


_CARRY_ON = object()


def _hang_up(fault: Fault) -> None:
    if fault.call:
        fault.call()


def kind_of(path: str) -> str:
    """Which budget a request counts against: the Hub's API, its resolvers, events, or the storage behind it."""
    if path.startswith("/cas/"):
        return "cas"
    if path.endswith("/events"):
        return "events"
    if "/buckets/" not in path:
        return "other"  # telemetry and the like
    return "resolver" if "/resolve/" in path else "api"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, *_: object) -> None:
        """A client that went away is nothing to report."""


def _handler(hub: TestHub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, *_: Any) -> None:
            """Quiet."""

        def handle_any(self) -> None:
            answer = hub.answer(self._request())
            if answer is None:
                self.close_connection = True
                with contextlib.suppress(OSError):
                    self.connection.shutdown(2)
            elif answer.stream is not None:
                self._stream(answer)
            else:
                self._send(answer)

        do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = handle_any

        def _request(self) -> Request:
            parts = urlsplit(self.path)
            headers = {key.lower(): value for key, value in self.headers.items()}
            query = dict(parse_qsl(parts.query))
            return Request(self.command, parts.path, query, headers, self._body(headers), hub.url)

        def _body(self, headers: dict[str, str]) -> bytes:
            if headers.get("transfer-encoding", "").lower() != "chunked":
                return self.rfile.read(int(headers.get("content-length", 0)))
            parts = []
            while size := int(self.rfile.readline().split(b";")[0], 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)

        def _send(self, answer: Answer) -> None:
            self._headers(answer, {"Content-Length": str(len(answer.body))})
            if self.command != "HEAD":
                self.wfile.write(answer.body)

        def _stream(self, answer: Answer) -> None:
            self.close_connection = True
            self._headers(answer, {"Connection": "close"})
            for piece in answer.stream or ():
                self.wfile.write(piece)
                self.wfile.flush()

        def _headers(self, answer: Answer, more: dict[str, str]) -> None:
            self.send_response(answer.status)
            for key, value in {**more, **answer.headers}.items():
                self.send_header(key, value)
            self.end_headers()

    return Handler


def serve_forever(port: int) -> None:
    """Run until interrupted, for use by hand: ``python -m helpers.hub PORT`` in tests/."""
    with TestHub(port) as hub:
        print(f"export HF_ENDPOINT={hub.url} HF_TOKEN={WRITE_TOKEN}", flush=True)
        while True:
            time.sleep(3600)
