"""A real S3 server on this machine: moto, in a process of its own, shared by a test session."""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator

from helpers.child import child
from helpers.server import ServerDied, free_port

ENVIRONMENT = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_REGION": "us-east-1"}


@contextlib.contextmanager
def moto_server(timeout: float = 180.0) -> Iterator[str]:
    """Its URL, once it answers; it forgets everything when it ends."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with tempfile.TemporaryFile() as log, child(command, stdout=log, stderr=log) as process:
        deadline = time.monotonic() + timeout
        while not _answers(url):
            if process.poll() is not None or time.monotonic() > deadline:
                log.seek(0)
                said = log.read()[-2000:].decode(errors="replace")
                raise ServerDied(f"moto ended with {process.poll()} or did not answer within {timeout:g} s: {said}")
            time.sleep(0.05)
        yield url


def new_bucket(url: str) -> str:
    """The name of a bucket that nobody else uses."""
    name = f"bucket{uuid.uuid4().hex}"
    with urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=30):
        return name


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/moto-api/", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
