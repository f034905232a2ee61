"""A server that answers slowly, endlessly or wrongly: every request ends by its deadline, with one of our errors."""

from __future__ import annotations

import gzip
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import pytest

import trl_callback.http as http_module
from delta_sync.errors import DeltaSyncError, FormatError
from trl_callback.http import Server, ServerUnavailableError
from trl_callback.status_client import StatusClient

TIMEOUT = 0.7
OK = b"HTTP/1.1 200 OK\r\n"
ENDED = threading.Event()


@contextmanager
def answering(behave: Callable[[socket.socket], None]) -> Iterator[str]:
    """A socket that lets ``behave`` answer whatever was asked, connection by connection."""

    def one(connection: socket.socket) -> None:
        with suppress(OSError), connection:
            connection.recv(65536)
            behave(connection)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=one, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def drip(start: bytes) -> Callable[[socket.socket], None]:
    def behave(connection: socket.socket) -> None:
        connection.sendall(start)
        for _ in range(100):
            connection.sendall(b"a")
            time.sleep(0.1)

    return behave


def with_body(body: bytes) -> Callable[[socket.socket], None]:
    return lambda connection: connection.sendall(OK + b"Content-Length: %d\r\n\r\n" % len(body) + body)


@pytest.mark.timeout(30)
@pytest.mark.parametrize("start", [b"", OK, OK + b"X: y", OK + b"Content-Length: 999\r\n\r\n{"])
def test_an_answer_that_drips_ends_at_the_deadline_and_leaves_one_thread_at_most(start: bytes) -> None:
    before = set(threading.enumerate())
    with answering(drip(start)) as url:
        server = Server(url)
        for _ in range(3):
            begin = time.monotonic()
            with pytest.raises(ServerUnavailableError, match="within"):
                server.get("/delta_sync/status", timeout=TIMEOUT)
            assert time.monotonic() - begin < 3 * TIMEOUT
        assert sum(t.name == "delta-sync-call" for t in threading.enumerate() if t not in before) <= 1


def test_an_endless_body_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_module, "_MAX_BODY", 1 << 20)

    def flood(connection: socket.socket) -> None:
        connection.sendall(OK + b"\r\n[")
        while True:
            connection.sendall(b"1," * 65536)

    with answering(flood) as url, pytest.raises(FormatError, match="at most 1048576 bytes"):
        Server(url).get("/", timeout=20)


@pytest.mark.parametrize(
    "body",
    [
        b"[" * 100_000,
        b'{"state": ' + b"9" * 10_000 + b"}",
        b"\xff\xfe",
        b"<html>",
        b"",
        b"null",
        b"[]",
        b'{"state": 7}',
    ],
)
def test_a_body_that_is_no_status_is_one_clear_error(body: bytes) -> None:
    with answering(with_body(body)) as url, pytest.raises(DeltaSyncError):
        StatusClient(Server(url), timeout=5).status()


def test_an_answer_packed_unasked_is_not_unpacked() -> None:
    body = gzip.compress(b" " * (1 << 20))
    start = OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(body)
    with answering(lambda connection: connection.sendall(start + body)) as url, pytest.raises(FormatError):
        Server(url).get("/", timeout=5)


@pytest.mark.parametrize("entry", ['{"digest": "zz"}', '{"digest": -1}', '{"digest": "10000000000000000"}'])
def test_a_tensor_with_an_impossible_digest_is_refused(entry: str) -> None:
    tensor = entry.replace("{", '{"dtype": "BF16", "shape": [2], ')
    body = f'{{"version": 1, "state_digest": "ab", "tensors": {{"w": {tensor}}}}}'.encode()
    with answering(with_body(body)) as url, pytest.raises(FormatError, match="64 bits"):
        StatusClient(Server(url), timeout=5).tensors()


@pytest.mark.parametrize(
    "url", ["http://me:secret@h:99999", "http://me:secret@h:x", "http://me:sec/ret@h", "me:secret@h:1"]
)
def test_a_url_that_is_none_is_refused_without_its_password(url: str) -> None:
    with pytest.raises(DeltaSyncError, match="URL of the rollout server") as caught:
        Server(url)
    assert "sec" not in str(caught.value)
