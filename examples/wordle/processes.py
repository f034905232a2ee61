"""Child processes that never outlive the demo: each in a process group of its own, each with a log."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO, Self

import psutil

KILL_SECONDS = 10.0  # for the kernel to end what was killed
POLL = 0.2  # seconds
LOG_LINES = 30
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class ProcessFailed(RuntimeError):
    """A child process ended or hung when it should not have; the message names its log and ends with its last lines."""


@dataclass
class Child:
    name: str
    log: Path
    process: subprocess.Popen[bytes]
    file: IO[bytes]

    def tail(self, lines: int = LOG_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def failed(self, problem: str) -> ProcessFailed:
        return ProcessFailed(f"{self.name} {problem}. Its log, {self.log}, ends with:\n{self.tail()}")


class Processes:
    """Starts children and, on leaving the `with`, ends all of them and everything they started."""

    def __init__(self, logs: Path, cwd: Path, grace: float = 15.0) -> None:
        self._logs, self._cwd, self._grace = logs, cwd, grace
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._logs.mkdir(parents=True, exist_ok=True)
        return self

    def __exit__(self, *exc: object) -> None:
        with _handling(signal.SIG_IGN):  # Ctrl-C must not cut the cleaning up short; it lasts `grace` at most
            self.stop()

    def start(self, name: str, command: Sequence[str], env: Mapping[str, str] | None = None) -> Child:
        """Start `command` in a new process group with `env` added to the environment; output goes to NAME.log."""
        log = self._logs / f"{name}.log"
        file = log.open("wb")
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            env={**os.environ, **(env or {})},
            cwd=self._cwd,
            start_new_session=True,
        )
        self._children.append(Child(name, log, process, file))
        return self._children[-1]

    def check(self, may_end: str | None = None) -> None:
        """Raise ProcessFailed if a child has ended that should be running, or the one named `may_end` with an error."""
        for child in self._children:
            code = child.process.poll()
            if code is not None and (child.name != may_end or code != 0):
                raise child.failed(f"ended with exit code {code}")

    def wait(
        self,
        ready: Callable[[], bool],
        child: Child,
        timeout: float,
        *,
        tick: Callable[[], None] = lambda: None,
        may_end: str | None = None,
    ) -> None:
        """Ask `ready` until it says so, with `tick` in between; ProcessFailed if a child ends or `timeout` passes."""
        deadline = time.monotonic() + timeout
        while not ready():
            self.check(may_end)
            if time.monotonic() > deadline:
                raise child.failed(f"was not ready within {timeout:g} s")
            tick()
            time.sleep(POLL)

    def kill(self, child: Child) -> None:
        """SIGKILL to a child's whole group, as an out-of-memory kill or a lost machine is; it is no longer watched."""
        _signal_group(child, signal.SIGKILL)
        child.process.wait()
        child.file.close()
        _wait_for_end({child.process.pid}, KILL_SECONDS)
        self._children.remove(child)

    def stop(self) -> None:
        """SIGTERM to every group, and SIGKILL to those with a member left after `grace` seconds."""
        for child in reversed(self._children):
            _signal_group(child, signal.SIGTERM)
        groups = {child.process.pid for child in self._children}
        _wait_for_end(groups, self._grace)
        for child in self._children:
            _signal_group(child, signal.SIGKILL)
            child.process.wait()
            child.file.close()
        _wait_for_end(groups, KILL_SECONDS)  # a kill is only a request, and nobody reaps grandchildren for us
        self._children.clear()


def _wait_for_end(groups: set[int], seconds: float) -> None:
    """Wait until no member of these groups runs, at most so long."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and any(_members(groups)):
        time.sleep(POLL / 4)


def _signal_group(child: Child, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # the whole group is gone
        os.killpg(child.process.pid, number)


def _members(groups: set[int]) -> Iterator[psutil.Process]:
    """The processes of these groups that still run; a zombie that nobody reaps (PID 1 of some containers) does not."""
    for process in psutil.process_iter(["status"]):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended meanwhile; it is somebody else's
            if os.getpgid(process.pid) in groups and process.info["status"] != psutil.STATUS_ZOMBIE:
                yield process


@contextlib.contextmanager
def _handling(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in ENDING}
    try:
        yield
    finally:
        for number, old in before.items():
            signal.signal(number, old)


@contextlib.contextmanager
def signals_as_exceptions() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into KeyboardInterrupt and ignore later ones: they'd cut cleaning up."""

    def interrupt(number: int, _: FrameType | None) -> None:
        for ending in ENDING:
            signal.signal(ending, signal.SIG_IGN)
        raise KeyboardInterrupt(signal.Signals(number).name)

    with _handling(interrupt):
        yield


def free_ports(count: int) -> list[int]:
    """Different TCP ports that nobody on this host listens on right now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
