"""Nothing survives: neither the child, nor what it started, nor when told rudely."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.wordle.processes import Processes, ProcessFailed, free_ports, signals_as_exceptions

ROOT = Path(__file__).resolve().parents[2]
FAMILY = """
import subprocess, sys, time, signal
if "stubborn" in sys.argv: signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen([sys.executable, "-c", "import signal, time\\n" +
    ("signal.signal(signal.SIGTERM, signal.SIG_IGN)\\n" if "stubborn" in sys.argv else "") + "time.sleep(300)"])
print(f"started {child.pid}\\n", end="", flush=True)  # at once, also where Python does not buffer
time.sleep(0 if "orphans" in sys.argv else 300)
"""


def family(processes, *how):
    """Start a parent with a child; return the parent and the child's pid."""
    parent = processes.start("family", [sys.executable, "-c", FAMILY, *how])
    deadline = time.monotonic() + 120
    while "started" not in (text := parent.log.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.02)
    return parent, int(text.split()[1])


def is_running(pid):
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


@pytest.mark.parametrize("how", [(), ("stubborn",), ("orphans",)])
def test_the_whole_family_is_ended(tmp_path, how):
    with Processes(tmp_path, ROOT, grace=2.0) as processes:
        parent, grandchild = family(processes, *how)
        assert is_running(grandchild)
    assert parent.process.poll() is not None
    assert not is_running(grandchild)


def test_it_is_ended_when_the_block_fails(tmp_path):
    with pytest.raises(RuntimeError, match="boom"), Processes(tmp_path, ROOT, grace=2.0) as processes:
        _, grandchild = family(processes)
        raise RuntimeError("boom")
    assert not is_running(grandchild)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_everything(tmp_path, number):
    script = f"""
import sys, time; from pathlib import Path
from examples.wordle.processes import Processes, signals_as_exceptions
with signals_as_exceptions(), Processes(Path({str(tmp_path)!r}), Path("."), grace=5) as processes:
    processes.start("family", [sys.executable, "-c", {FAMILY!r}])
    print("ready", flush=True)
    time.sleep(300)
"""
    demo = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        demo.stdout.readline()
        log, deadline = tmp_path / "family.log", time.monotonic() + 120
        while "started" not in log.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.02)
        demo.send_signal(number)
        demo.send_signal(number)  # impatient: twice
        demo.communicate(timeout=120)
        assert demo.returncode != 0
        assert not is_running(int(log.read_text().split()[1]))
    finally:
        demo.kill()


def test_a_child_that_ends_early_is_named_with_its_last_lines(tmp_path):
    with Processes(tmp_path, ROOT) as processes:
        child = processes.start("teller", [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"])
        with pytest.raises(ProcessFailed, match=r"(?s)teller ended with exit code 3.*teller\.log.*the reason"):
            processes.wait(lambda: False, child, timeout=120)


def test_a_child_that_may_end_must_end_well(tmp_path):
    with Processes(tmp_path, ROOT) as processes:
        child = processes.start("trainer", [sys.executable, "-c", "raise SystemExit(0)"])
        child.process.wait(timeout=120)
        processes.check(may_end="trainer")
        with pytest.raises(ProcessFailed):
            processes.check()
    with Processes(tmp_path, ROOT) as processes:
        child = processes.start("trainer", [sys.executable, "-c", "raise SystemExit(1)"])
        child.process.wait(timeout=120)
        with pytest.raises(ProcessFailed, match="exit code 1"):
            processes.check(may_end="trainer")


def test_waiting_has_a_deadline(tmp_path):
    ticks = []
    with Processes(tmp_path, ROOT, grace=2.0) as processes:
        child = processes.start("slow", [sys.executable, "-c", "import time; time.sleep(60)"])
        with pytest.raises(ProcessFailed, match=r"slow was not ready within 0\.5 s"):
            processes.wait(lambda: False, child, timeout=0.5, tick=lambda: ticks.append(1))
    assert ticks


def test_environment_is_added_to_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("OURS", "1")
    with Processes(tmp_path, ROOT) as processes:
        code = "import os; print(os.environ['OURS'], os.environ['THEIRS'])"
        child = processes.start("env", [sys.executable, "-c", code], {"THEIRS": "2"})
        child.process.wait(timeout=120)
        assert child.tail() == "1 2"


def test_free_ports_differ_and_are_free():
    ports = free_ports(5)
    assert len(set(ports)) == 5
    for port in ports:
        with socket.socket() as one:
            one.bind(("127.0.0.1", port))


def test_handlers_are_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), signals_as_exceptions():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(1)
    assert signal.getsignal(signal.SIGTERM) is before
