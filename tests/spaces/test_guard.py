"""docker/guard.py before a real ASGI server: what is open, what asks for the key."""

import sys
import threading
import time
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, WebSocket
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "docker"))
from guard import Guard


@pytest.fixture(scope="module")
def url():
    app = FastAPI()
    for path in ("/health", "/v1/models", "/invocations", "/healthy"):
        app.add_api_route(path, lambda: {}, methods=["GET", "POST"])

    @app.websocket("/ws")
    async def ws(socket: WebSocket):
        await socket.accept()
        await socket.send_text("in")
        await socket.close()

    server = uvicorn.Server(uvicorn.Config(Guard(app, ["right", "other"]), port=0, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(10)


@pytest.mark.parametrize("path", ["/v1/models", "/invocations", "/healthy", "/docs", "/nowhere", "//health"])
def test_everything_but_health_asks_for_the_key(url, path):
    for header in ("", "right", "Basic right", "Bearer wrong", "Bearer righ", "Bearer", "Bearer right2"):
        answer = httpx.get(url + path, headers={"Authorization": header} if header else {}, trust_env=False)
        assert answer.status_code == 401, (path, header)


def test_the_key_opens_and_health_is_open(url):
    for key in ("Bearer right", "bearer other"):
        assert httpx.post(f"{url}/invocations", headers={"Authorization": key}, trust_env=False).status_code == 200
    assert httpx.get(f"{url}/health", trust_env=False).status_code == 200
    assert httpx.get(url, trust_env=False).json()["health"] == "/health"


def test_a_websocket_opens_only_with_the_key(url):
    socket = url.replace("http", "ws") + "/ws"
    with pytest.raises(InvalidStatus, match="403"):
        connect(socket, proxy=None)
    with connect(socket, proxy=None, additional_headers={"Authorization": "Bearer right"}) as open_socket:
        assert open_socket.recv(timeout=5) == "in"


def test_a_guard_without_a_key_is_refused(monkeypatch):
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    monkeypatch.delenv("DELTA_SYNC_ADMIN_KEY", raising=False)
    with pytest.raises(ValueError, match="set VLLM_API_KEY"):
        Guard(FastAPI())
    monkeypatch.setenv("VLLM_API_KEY", "k")
    Guard(FastAPI())
