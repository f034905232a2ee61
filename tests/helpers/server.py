"""A real server process on a free port, with its log kept and a guaranteed end."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import SystemRandom
from types import ModuleType
from typing import Any

import psutil

from helpers import live_memory, slow_steps, vllm_plugins
from helpers.machine import SERVE_ARGS

QUIET_CPU = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "INFO",  # importing TRL sets it to ERROR for the whole process and its children
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
SMALL = ("--enforce-eager", "--dtype", "bfloat16", "--max-model-len", "2048", "--max-num-seqs", "8", *SERVE_ARGS)


def free_port() -> int:
    """A port nobody listens on right now, of those that no kernel gives to outgoing connections meanwhile."""
    random = SystemRandom()
    while True:
        port = random.randrange(20_000, 32_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class ServerDied(RuntimeError):
    """The server ended or never became healthy; the message holds the end of its log."""


class VllmServer:
    """``vllm serve MODEL ARGS`` as a context manager: healthy on entry, its whole process group gone on exit."""

    def __init__(
        self,
        model: Path | str,
        log: Path,
        args: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
        base: Sequence[str] = SMALL,
        plugins: Sequence[ModuleType] = (),
    ) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = log
        self.headers: dict[str, str] = {}
        self._command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *base]
        self._command += ["--host", "127.0.0.1", "--port", str(self.port), "--served-model-name", "tiny", *args]
        self._slow, self._damage, self._loading = map(log.with_suffix, (".slow", ".damage", ".loading"))
        self._env = {**os.environ, **QUIET_CPU, **(env or {})}
        if plugins:
            self._env |= vllm_plugins.environment(log.with_suffix(".plugins"), *plugins)
            self._env[slow_steps.WHILE] = str(self._slow)
            self._env |= {live_memory.DAMAGE: str(self._damage), live_memory.LOADING: str(self._loading)}
        self._process: subprocess.Popen[bytes] | None = None
        self.kills = 0  # how often something of it was killed

    def __enter__(self) -> VllmServer:
        self.start()
        try:
            self.wait_healthy()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process in its own session, output appended to the log."""
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self._command, env=self._env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            )

    def wait_healthy(self, timeout: float = 300.0) -> None:
        """Until /health answers 200; ServerDied if the process ends or time is over."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            if not self.alive:
                raise ServerDied(f"ended with {self._process and self._process.returncode}\n{self.tail()}")
            try:
                with urllib.request.urlopen(f"{self.url}/health", timeout=5):
                    return
            except (urllib.error.URLError, OSError):
                time.sleep(0.25)
        raise ServerDied(f"not healthy after {timeout:g} s\n{self.tail()}")

    @property
    def alive(self) -> bool:
        """True while the server's first process runs."""
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        """The first process's id, which is also its group's."""
        if self._process is None:
            raise ServerDied("not started")
        return self._process.pid

    def stop(self, timeout: float = 20.0) -> None:
        """SIGTERM to the first process, then SIGKILL to whatever of the group is left."""
        if self._process is None:
            return
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout)
        self.kill()

    def kill(self) -> None:
        """SIGKILL to the whole group, now."""
        if self._process is not None:
            self.kills += 1
            self._signal(signal.SIGKILL)
            self._process.wait(120)

    def engine(self) -> psutil.Process:
        """The EngineCore process, of one engine."""
        [engine] = [p for p in psutil.Process(self.pid).children(recursive=True) if "EngineCore" in p.name()]
        return engine

    def kill_engine(self, timeout: float = 60.0) -> None:
        """SIGKILL to the EngineCore process alone, and wait until the API server has ended for want of it."""
        self.kills += 1
        self.engine().kill()
        assert self._process is not None
        self._process.wait(timeout)
        self._signal(signal.SIGKILL)

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def tail(self, lines: int = 40) -> str:
        """The end of the log."""
        return "\n".join(self.text().splitlines()[-lines:])

    def text(self) -> str:
        """The whole log so far."""
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def get(self, path: str, timeout: float = 60.0) -> Any:
        """GET as JSON; urllib's HTTPError for other codes than 2xx."""
        return json.loads(self.get_bytes(path, timeout)[0])

    def get_bytes(self, path: str, timeout: float = 60.0) -> tuple[bytes, Mapping[str, str]]:
        """GET as bytes and headers."""
        request = urllib.request.Request(f"{self.url}{path}", headers=self.headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return response.read(), dict(response.headers)

    def post(self, path: str, body: Mapping[str, Any], timeout: float = 120.0) -> Any:
        """POST JSON, answer as JSON."""
        headers = {"Content-Type": "application/json", **self.headers}
        request = urllib.request.Request(f"{self.url}{path}", json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=timeout) as response:
            return json.loads(response.read())

    def complete(self, prompt: Sequence[int], max_tokens: int = 16, **more: Any) -> dict[str, Any]:
        """One greedy completion; the answer's first choice with "usage" added."""
        body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}
        answer = self.post("/v1/completions", {**body, **more})
        return {**answer["choices"][0], "usage": answer["usage"]}

    @contextlib.contextmanager
    def slow_steps(self) -> Iterator[None]:
        """Streams of a server with the plugin ``slow_steps`` don't end in here, for half a minute."""
        self._slow.touch()
        try:
            yield
        finally:
            self._slow.unlink()

    @contextlib.contextmanager
    def held_load(self) -> Iterator[None]:
        """A load in place does not end in here, on a server with the plugin ``live_memory``, for a minute."""
        self._loading.touch()
        try:
            yield
        finally:
            self._loading.unlink()

    def damage_weights(self) -> None:
        """Flip one bit of live weights and have them scanned, on a server with the plugin ``live_memory``."""
        self._damage.touch()
        self.get("/delta_sync/tensors?scan=1")
        assert not self._damage.exists()

    def ready(self) -> tuple[int, dict[str, Any]]:
        """What the readiness probe answers: code and body."""
        try:
            return 200, self.get("/delta_sync/ready")
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def status(self) -> dict[str, Any]:
        """GET /delta_sync/status."""
        return self.get("/delta_sync/status")

    def wait_status(self, what: str, condition: Any, timeout: float = 60.0) -> dict[str, Any]:
        """Poll the status until ``condition(status)``; AssertionError showing the last one at the deadline."""
        deadline = time.monotonic() + timeout
        while True:
            status = self.status()
            if condition(status):
                return status
            if time.monotonic() > deadline:
                raise AssertionError(f"waited {timeout:g} s for {what}; status: {status}\n{self.tail(20)}")
            time.sleep(0.05)

    def wait_version(self, version: int, timeout: float = 60.0) -> dict[str, Any]:
        """Until this version or a later one is served."""
        return self.wait_status(f"version {version}", lambda s: (s["version"] or -1) >= version, timeout)
