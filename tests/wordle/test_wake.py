"""Waiting for a server that is asleep, over HTTP: what a Space's proxy answers, and then the Space."""

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from examples.wordle import wake
from examples.wordle.wake import NotAwake, wait_until_awake

UP = (200, "application/json")


@pytest.fixture
def sleeper(monkeypatch):
    """A server that answers /health with the given answers in turn, the last one for ever; "k" is its key."""
    monkeypatch.setattr(wake, "POLL", 0.05)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            if self.path == "/health":
                status, kind = server.answers.pop(0) if len(server.answers) > 1 else server.answers[0]
            else:
                status, kind = (200 if self.headers.get("Authorization") == f"Bearer {server.key}" else 401), UP[1]
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.answers, server.key, server.url = [UP], "k", f"http://127.0.0.1:{server.server_port}"
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def test_a_sleeping_server_is_waited_for(sleeper):
    sleeper.answers = [(503, "text/html"), (200, "text/html; charset=utf-8"), (502, "text/plain"), UP]
    wait_until_awake(sleeper.url + "/", "k", 20, probe="/v1/models")
    assert sleeper.answers == [UP]


def test_a_server_that_stays_asleep_is_an_error_that_says_what_to_do(sleeper, capsys, monkeypatch):
    monkeypatch.setattr(wake, "TELL", 0.1)
    sleeper.answers = [(503, "text/html")]
    started = time.monotonic()
    with pytest.raises(NotAwake, match=r"within 0.5 s, got HTTP 503. Remedy: .*hf spaces restart"):
        wait_until_awake(sleeper.url, "k", 0.5, probe="/v1/models")
    assert time.monotonic() - started < 5
    assert "waiting for" in capsys.readouterr().err


def test_nobody_there_is_the_same():
    with pytest.raises(NotAwake, match="ConnectError"):
        wait_until_awake("http://127.0.0.1:9", None, 0.1, probe="/")


def test_a_refused_key_is_said_at_once_unless_it_is_new(sleeper):
    with pytest.raises(NotAwake, match="VLLM_API_KEY"):
        wait_until_awake(sleeper.url, "wrong", 60, probe="/v1/models")
    sleeper.key = "old"
    threading.Timer(0.4, setattr, (sleeper, "key", "new")).start()
    wait_until_awake(sleeper.url, "new", 20, probe="/v1/models", new_key=True)
    with pytest.raises(NotAwake, match="WORDLE_ENV_TOKEN"):
        wait_until_awake(sleeper.url, "never", 0.3, probe="/v1/models", new_key=True)
