"""Run as a process: one engine of a group that shares experts, without a model: real gloo group, store and meetings.

Usage: sharing_engine.py ENGINE ENGINES PORT RUN SETTINGS. It makes steps as vLLM's DPEngineCoreProc does, each of them
a collective in which the engines compare the bits they compute with; one line of JSON on stdin is one question, one
line on stdout, among those of vLLM's log, its answer.
"""

from __future__ import annotations

import json
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from datetime import timedelta
from typing import Any

import numpy as np
import torch
from engine_fakes import ANSWER, SHAPES, Rank
from vllm.config import ParallelConfig

from delta_sync.errors import NotFoundError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.store.base import ObjectInfo
from delta_sync.store.local import LocalStore
from delta_sync.store.open import open_store
from vllm_delta_plugin import engine_core
from vllm_delta_plugin.compat.lockstep import Lockstep
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.engine_core import DeltaSync, EngineFacts
from vllm_delta_plugin.expert_group import ExpertGroup

dist: Any = torch.distributed  # of which torch exports half for type checkers
INTERVAL = 8  # steps between two meetings
STEP = 0.002  # seconds
LATE = 0.7  # seconds


class LateStore(LocalStore):
    """Shows what was written only LATE seconds later, as a store may that is told of changes."""

    def get(self, key: str, *, max_bytes: int) -> bytes:
        if self._is_new(key):
            raise NotFoundError(key, expected="an object", got="none yet")
        return super().get(key, max_bytes=max_bytes)

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return (found for found in super().list(prefix) if not self._is_new(found.key))

    def _is_new(self, key: str) -> bool:
        try:
            return time.time() - (self.root / key).stat().st_mtime < LATE
        except FileNotFoundError:
            return False


class Outputs:
    """Takes the one message that wakes the others, to where they look for it."""

    def __init__(self, core: Core) -> None:
        self._core = core

    def put_nowait(self, message: tuple[int, Any]) -> None:
        client, outputs = message
        assert (client, outputs.start_wave) == (-1, self._core.current_wave)
        self._core.store.set("woken", str(outputs.start_wave + 1))


class Core:
    """What Lockstep needs of an EngineCore, and the busy loop."""

    has_coordinator = True

    def __init__(self, engine: int, engines: int, port: int) -> None:
        self.store = dist.TCPStore("127.0.0.1", port, engines, engine == 0, timeout=timedelta(seconds=60))
        self.dp_store = dist.PrefixStore("engines", self.store)
        self.dp_group = dist.ProcessGroupGloo(
            dist.PrefixStore("gloo", self.store), engine, engines, timedelta(seconds=60)
        )
        self.dp_rank, self.dp_size = engine, engines
        self.engines_running, self.busy, self.paused = False, False, False
        self.current_wave = self.step_counter = self.forwards = self.mixed = 0
        self.output_queue = Outputs(self)
        self.inputs: queue.Queue[Any] = queue.Queue()
        self.mark: Callable[[], int] = lambda: 0

    def is_scheduler_paused(self) -> bool:
        return self.paused

    def loop(self, sync: DeltaSync, stop: threading.Event) -> None:
        self.store.set("woken", "0") if self.dp_rank == 0 else None
        while not stop.is_set():
            self._take_in(sync)
            if self.engines_running:
                self._forward()
                self.engines_running = self._unfinished()

    def _take_in(self, sync: DeltaSync) -> None:
        sync.main.pump()
        if self.busy or int(self.store.get("woken")) > self.current_wave:
            self.engines_running = True
        if not self.engines_running:
            try:
                self.inputs.get(timeout=0.005)
            except queue.Empty:
                return
            sync.main.pump()

    def _forward(self) -> None:
        """All engines' weights must be one version's."""
        mark: int = self.mark()
        marks = torch.tensor([mark, -mark], dtype=torch.int64)
        dist.all_reduce(marks, op=dist.ReduceOp.MAX, group=self.dp_group)
        self.forwards += 1
        self.mixed += int(marks[0]) != -int(marks[1])
        time.sleep(STEP)

    def _unfinished(self) -> bool:
        self.step_counter += 1
        if self.step_counter % INTERVAL:
            return True
        unfinished, _ = ParallelConfig.sync_dp_state(self.dp_group, has_unfinished=self.busy, pending_pause=False)
        if not unfinished:
            self.current_wave, self.step_counter = self.current_wave + 1, 0
        return unfinished


def main() -> None:
    engine, engines, port = (int(value) for value in sys.argv[1:4])
    run, settings = sys.argv[4], json.loads(sys.argv[5])
    weights = {name: np.frombuffer(bytes.fromhex(settings["weights"][name]), "<u2") for name in SHAPES}
    rank = Rank(engine, Ledger(open_store(run)), {n: bits.reshape(SHAPES[n]).copy() for n, bits in weights.items()})
    rank.fail = set(settings["fail"].get(str(engine), ()))
    rank.too_small = "too_small" in rank.fail
    if "sees late" in rank.fail:
        engine_core.open_store = LateStore
    may_stage = threading.Event()
    may_stage.set()
    core = Core(engine, engines, port)
    core.mark = lambda: int(rank.live["norm"][0])

    def rpc(method: str, args: tuple[Any, ...] = ()) -> list[dict[str, Any]]:
        name = method.removeprefix("delta_sync_")
        if name == "stage_poll" and not may_stage.is_set():
            return [{"ok": True, "error": None, "state": "staging"}]
        if name == "commit" and "die" in rank.fail:
            os.kill(os.getpid(), signal.SIGKILL)
        return [rank.call(name, args)]

    config = ReplicaConfig(run, replica="r", retry=0.5, poll=0.01, audit_period=1e9, **settings["config"])
    facts = EngineFacts("m", "bfloat16", "processed_logprobs", engine)
    stop = threading.Event()
    arm = ExpertGroup.commit

    def commit(group: ExpertGroup, *args: Any) -> Any:
        if "arm" in rank.fail:
            raise StoreError("it can't be armed")
        return arm(group, *args)

    ExpertGroup.commit = commit  # type: ignore[method-assign]
    sync = DeltaSync(config, facts, rpc, lambda: core.inputs.put(None), lambda *_: None, Lockstep(core))  # type: ignore[arg-type]
    sync.start()

    def answer(question: dict[str, Any]) -> Any:
        if "fail" in question:
            rank.fail = set(question["fail"])
        if "may_stage" in question:
            (may_stage.set if question["may_stage"] else may_stage.clear)()
        if "busy" in question:
            core.busy = question["busy"]
            core.inputs.put(None)
        if "damaged" in question:
            rank.damaged = question["damaged"]
        if "spoil" in question:
            rank.live["w"][0, 0 if engine == 0 else 3] ^= 1
        if "control" in question:
            action, version = question["control"]
            done = sync.control(action, version, question.get("seconds", 20.0), False, question["order"])
            return done.result(120.0)
        if "scan" in question:
            found = sync.tensors(True)
            return found.result(120.0) if isinstance(found, Future) else found
        bits = {name: value.tobytes().hex() for name, value in rank.live.items()}
        ours = {"bits": bits, "forwards": core.forwards, "mixed": core.mixed, "switch": sys.getswitchinterval()}
        return sync.status() | ours

    def answered(question: dict[str, Any]) -> Any:
        try:
            return answer(question)
        except Exception as error:  # noqa: BLE001  # the test waits for a line
            return {"failed": repr(error)}

    def questions() -> None:
        for line in sys.stdin:
            threading.Thread(target=lambda text=line: say(answered(json.loads(text))), daemon=True).start()
        stop.set()

    def say(what: Any) -> None:
        sys.stdout.write(f"\n{ANSWER}{json.dumps(what)}\n")  # at once: other threads log to the same stream
        sys.stdout.flush()

    threading.Thread(target=questions, daemon=True).start()
    say("ready")
    core.loop(sync, stop)
    sync.stop()


if __name__ == "__main__":
    main()
