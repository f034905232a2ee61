"""The command line as a process of its own."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys

HERE = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}


def test_python_m_prints_one_document_and_loads_no_torch(run):
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\n"
        "from delta_sync.cli import main\nmain()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "ledger", run.uri, "--json"], capture_output=True, text=True, timeout=120, env=HERE
    )
    assert (done.returncode, done.stderr.strip()) == (0, "False")
    assert json.loads(done.stdout)["newest"] == 6
    plain = [sys.executable, "-m", "delta_sync.cli", "verify", run.uri]
    done = subprocess.run(plain, capture_output=True, text=True, timeout=120, env=HERE)
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "no damage found"


def test_a_terminal_gets_a_drawn_table(run):
    master, slave = pty.openpty()
    words = [sys.executable, "-m", "delta_sync.cli", "ledger", run.uri]
    done = subprocess.run(words, stdout=slave, timeout=120, env={**HERE, "TERM": "xterm", "COLUMNS": "120"})
    os.close(slave)
    shown = os.read(master, 1 << 16).decode()
    os.close(master)
    assert done.returncode == 0
    assert "┏" in shown
    assert "\\n" not in shown


def test_without_the_extra_one_line_says_how_to_get_it():
    code = "import sys; sys.modules['typer'] = None\nfrom delta_sync.cli import main\nmain()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, env=HERE)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "delta-sync needs typer: pip install 'delta-weight-sync[cli]'\n"
