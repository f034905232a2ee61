"""Real servers on free ports, in threads of the test process."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import uvicorn

from examples.wordle.env_server import create_app


@pytest.fixture
def serve() -> Iterator[Callable[[Any], str]]:
    """Start an ASGI app on a free port and return its URL; every server is stopped after the test."""
    running: list[tuple[uvicorn.Server, threading.Thread]] = []

    def start(app: Any) -> str:
        server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        running.append((server, thread))
        deadline = time.monotonic() + 120
        while not server.started:
            if time.monotonic() > deadline or not thread.is_alive():
                raise RuntimeError("the test server did not start within 120 s")
            time.sleep(0.01)
        return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"

    yield start
    for server, thread in running:
        server.force_exit = server.should_exit = True
        thread.join(timeout=10)


@pytest.fixture
def wordle_url(serve: Callable[[Any], str]) -> str:
    return serve(create_app(max_sessions=4))
