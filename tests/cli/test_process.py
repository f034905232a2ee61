"""The command line as a process of its own."""

from __future__ import annotations

import json
import os
import pty
import resource
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


def test_what_was_found_does_not_depend_on_who_reads_it(run):
    """Closed, full, or of an encoding without bars: one line at most, and the exit code that it always is."""
    words = f"{sys.executable} -m delta_sync.cli"
    for line, code in (
        (f"{words} ledger {run.uri} >&-", 0),
        (f"{words} verify {run.uri} | true; exit ${{PIPESTATUS[0]}}", 0),
        (f"{words} ledger {run.uri} > /dev/full", 1),
        (f"{words} ledger {run.uri} --json > /dev/full", 1),
        (f"PYTHONIOENCODING=latin-1 {words} inspect {run.uri}@2 > /dev/null", 0),
    ):
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=120, env=HERE)
        full = "delta-sync: standard output: No space left on device\n" if code else ""
        assert (done.returncode, done.stderr) == (code, full), line


def test_a_wrong_usage_is_a_document_too(run, cli, as_json):
    for words in (["ledger"], ["ledger", "s4://a/b"], ["ledger", run.uri, "--nope"], ["reset", run.uri], ["nope"]):
        code, document = as_json(*words)
        assert (code, document["error"]["kind"]) == (2, "UsageError")
    assert cli("ledger")[1] == ""
    code, document = as_json("watch", run.uri, "--public-key", "ed25519:nonsense")
    assert (code, document["error"]["kind"]) == (2, "UsageError")


def test_a_version_that_is_not_there_yet_is_told_from_one_that_is_gone(run, as_json):
    for words in (["inspect", f"{run.uri}@9"], ["materialize", f"{run.uri}@9", run.folder / "out"]):
        code, document = as_json(*words)
        assert (code, document["error"]["kind"]) == (1, "ChainError")
        assert "expected at most 6, the newest" in document["error"]["message"]


def test_version(cli):
    code, out, _ = cli("--version")
    assert (code, out.split()[0]) == (0, "delta-sync")


def test_half_a_key_is_not_left_behind(tmp_path, cli):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, before[1]))  # a disk that is full
    try:
        code, _, err = cli("keygen", tmp_path / "key")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert (code, list(tmp_path.iterdir())) == (1, [])
    assert err == f"delta-sync: {tmp_path / 'key.pub'}: File too large\n"
    assert cli("keygen", tmp_path / "key")[0] == 0
