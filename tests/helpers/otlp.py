"""A receiver of OpenTelemetry spans on the loopback interface: what a collector is, as far as tests need one."""

from __future__ import annotations

import gzip
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True)
class Received:
    """One span; ids in hexadecimal digits, times in unix seconds, ``error`` the status' message or None."""

    name: str
    trace: str
    id: str
    parent: str
    began: float
    ended: float
    attributes: dict[str, Any]
    error: str | None


class Collector:
    """``url`` takes OTLP over HTTP, at /v1/traces; ``raw`` keeps every byte that came."""

    def __init__(self) -> None:
        self.spans: list[Received] = []
        self.raw = b""
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        take = self._take

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                assert self.path == "/v1/traces"
                take(gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body)
                self.send_response(200)
                self.send_header("Content-Type", "application/x-protobuf")
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        return Handler

    def _take(self, body: bytes) -> None:
        self.raw += body
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            for scope in resource.scope_spans:
                self.spans += [_received(span) for span in scope.spans]

    def ours(self, trace: str) -> dict[str, Received]:
        """This project's spans of one trace, by name."""
        return {span.name: span for span in self.spans if span.trace == trace and span.name.startswith("delta_sync.")}

    def wait(self, trace: str, name: str, timeout: float = 30.0) -> dict[str, Received]:
        """The trace's spans once that of this name is there; AssertionError at the deadline."""
        deadline = time.monotonic() + timeout
        while name not in (found := self.ours(trace)):
            assert time.monotonic() < deadline, f"waited for {name}: {sorted(found)}"
            time.sleep(0.05)
        return found


@contextmanager
def collector() -> Iterator[Collector]:
    """One that listens until the block ends."""
    made = Collector()
    thread = threading.Thread(target=made._server.serve_forever, daemon=True)
    thread.start()
    try:
        yield made
    finally:
        made._server.shutdown()
        made._server.server_close()
        thread.join(5)


def _received(span: Any) -> Received:
    values = {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}
    times = span.start_time_unix_nano / 1e9, span.end_time_unix_nano / 1e9
    ids = span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex()
    return Received(span.name, *ids, *times, values, (span.status.message or "?") if span.status.code == 2 else None)
