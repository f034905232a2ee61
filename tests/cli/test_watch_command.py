from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time

import pytest
from helpers.child import child

WATCH = [sys.executable, "-m", "delta_sync.cli", "watch"]


class Watching:
    """``watch --json`` as a process, read line by line with a deadline."""

    def __init__(self, *words):
        command = [*WATCH, *map(str, words), "--json", "--interval", "0.05", "--for", "60"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def until(self, event, **wanted):
        """The next line of this event with these values, and those before it."""
        skipped = []
        for line in self.process.stdout:
            found = json.loads(line)
            if found["event"] == event and all(found[name] == value for name, value in wanted.items()):
                return found, skipped
            skipped.append(found)
        pytest.fail(f"ended before {event} {wanted}: {skipped} {self.process.stderr.read()}")

    def interrupt(self):
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(60)


@pytest.fixture
def watching():
    started = []

    def start(*words):
        started.append(Watching(*words))
        return started[-1]

    yield start
    for one in started:
        one.process.kill()
        one.process.wait(60)


def test_a_line_for_each_thing_that_happens_and_an_end_on_ctrl_c(run, watching):
    run.acknowledge("east", 6)
    watch = watching(run.uri, "--last", 3)
    found, before = watch.until("replica", replica="east")
    assert [(line["event"], line["version"]) for line in before] == [("version", 4), ("version", 5), ("version", 6)]
    assert (found["health"], found["lag"]) == ("current", 0)
    run.keep(run.publisher.step(9))
    found, _ = watch.until("version", version=7)
    assert found["manifest"] == run.manifests[7].sha256
    watch.until("replica", replica="east", health="behind", lag=1)
    run.publisher.anchor(run.manifests[7])
    found, _ = watch.until("anchor", version=7)
    assert found["anchor"]["files"] == 1
    run.acknowledge("east", 6, state="refused", refused_version=7, error_kind="IntegrityError", error="not those bits")
    found, _ = watch.until("replica", replica="east", health="refused")
    assert found["error"] == "not those bits"
    (run.folder / "replicas" / "east.json").unlink()
    watch.until("gone", replica="east")
    assert watch.interrupt() == 0


def test_it_waits_for_the_first_version_and_ends_in_time(tmp_path, cli):
    began = time.monotonic()
    code, out, _ = cli("watch", tmp_path / "nothing", "--for", 0.2, "--interval", 0.05)
    assert (code, out) == (0, "")
    assert 0.2 <= time.monotonic() - began < 10


def test_the_exit_code_is_that_of_the_last_look(run, cli):
    run.acknowledge("west", 4, state="refused", refused_version=5, error="no\x1b[2J")
    code, out, _ = cli("watch", run.uri, "--for", 0)
    assert code == 1
    assert "replica west: refused, version 4, 2 behind. refused 5: no\\x1b[2J" in out.splitlines()


def test_a_store_that_fails_for_a_while(tmp_path, watching, run):
    place = run.folder / "manifests"
    watch = watching(run.uri)
    watch.until("version", version=6)
    place.rename(run.folder / "away")
    place.symlink_to(tmp_path)  # which a store must not follow
    (run.folder / "epochs" / "000002.json").write_bytes(b"{}")  # so that it has to look
    assert watch.until("error")[0]["kind"] == "StoreError"
    (run.folder / "epochs" / "000002.json").unlink()
    place.unlink()
    (run.folder / "away").rename(place)
    watch.until("recovered")
    assert watch.interrupt() == 0


def test_a_terminal_gets_tables_that_change(run):
    run.acknowledge("east", 6)
    parent, terminal = pty.openpty()
    command = [*WATCH, run.uri, "--for", "60", "--interval", "0.05"]
    environment = os.environ | {"TERM": "xterm-256color", "COLUMNS": "120", "LINES": "40"}
    shown = ""

    def shows(text):
        nonlocal shown
        while text not in shown:
            shown += os.read(parent, 65536).decode(errors="replace")
        return True

    with child(command, stdout=terminal, stdin=terminal, stderr=terminal, env=environment) as process:
        os.close(terminal)
        assert shows("version 6, epoch 1")
        assert shows("east")
        run.keep(run.publisher.step(9))
        assert shows("version 7, epoch 1")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    os.close(parent)
