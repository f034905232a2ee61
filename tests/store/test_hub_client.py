"""The Hub's client against servers that drip, flood or send it elsewhere."""

from __future__ import annotations

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from delta_sync import StoreError
from delta_sync.store import hub_client
from delta_sync.store.attempts import Deadline
from delta_sync.store.hub_client import HubClient


@contextmanager
def answering(answer):
    """A server whose answers are what ``answer(handler)`` writes; yields its URL and the requests it got."""
    seen = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            seen.append((self.path, dict(self.headers)))
            answer(self)

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        server.server_close()


def endless(piece, pause):
    def answer(handler):
        handler.send_response(200)
        handler.end_headers()
        try:
            while True:
                handler.wfile.write(piece)
                time.sleep(pause)
        except OSError:
            pass

    return answer


def ask(url, seconds):
    return HubClient("org/name", url).call("GET", f"{url}/x", Deadline(seconds), doing="look at it")


def test_an_answer_that_drips_ends_at_the_deadline():
    with answering(endless(b" ", 0.05)) as (url, _):
        began = time.monotonic()
        with pytest.raises(StoreError, match="look at it"):
            ask(url, 1.5)
        assert time.monotonic() - began < 5


def test_headers_that_drip_end_at_the_deadline():
    def answer(handler):
        handler.send_response(200)
        handler.flush_headers()
        endless_headers(handler)

    def endless_headers(handler):
        try:
            for k in range(1000):
                handler.wfile.write(f"X-{k}: y\r\n".encode())
                time.sleep(0.05)
        except OSError:
            pass

    with answering(answer) as (url, _):
        began = time.monotonic()
        with pytest.raises(StoreError, match="look at it"):
            ask(url, 1.5)
        assert time.monotonic() - began < 5


def test_an_answer_without_end_is_not_collected(monkeypatch):
    monkeypatch.setattr(hub_client, "ANSWER_BYTES", 1 << 20)
    with answering(endless(bytes(1 << 16), 0)) as (url, seen):
        with pytest.raises(StoreError, match="no end after 1"):
            ask(url, 3)
        assert len(seen) > 1  # it was tried again, as it may have been a proxy's mistake


@pytest.mark.parametrize("target", ["https://{host}/y", "http://localhost:1/y"])
def test_a_redirect_to_another_scheme_or_host_is_not_followed(target, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")

    def answer(handler):
        handler.send_response(302)
        handler.send_header("Location", target.format(host=handler.headers["Host"]))
        handler.send_header("Content-Length", "0")
        handler.end_headers()

    with answering(answer) as (url, seen):
        with pytest.raises(StoreError, match="status 302") as caught:
            ask(url, 3)
        assert [path for path, _ in seen] == ["/x"]
        assert "hf_secret" not in str(caught.value)
