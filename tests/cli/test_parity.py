"""What parity says before it can compare anything; comparing is tests/engine/test_cli_against_serve.py."""

from __future__ import annotations

import os
import subprocess
import sys

from helpers.server import free_port

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def call(run, code="", url="http://127.0.0.1:1"):
    program = f"{code}\nfrom delta_sync.cli import main\nmain()"
    words = [sys.executable, "-c", program, "parity", run.uri, "--server", url]
    return subprocess.run(words, capture_output=True, text=True, timeout=300, env={**HERE, "COLUMNS": "200"})


def test_without_the_extra_it_says_how_to_get_it(run):
    done = call(run, "import sys; sys.modules['torch'] = None")
    assert done.returncode == 2 and done.stdout == ""
    assert "parity needs torch: pip install 'delta-weight-sync[trl]'" in done.stderr


def test_a_server_that_is_away_is_unreachable(run):
    done = call(run, url=f"http://127.0.0.1:{free_port()}")
    assert done.returncode == 3
    assert "connection refused" in done.stderr
