"""Seam: EngineCore's pauses, and starting running requests over, for the ways in which requests meet new weights."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from vllm_delta_plugin.compat import encoder_cache
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.main_thread import MainThread, Stopped

_SLICE = 0.5  # seconds between two looks at the stop event
_POLL = 0.05  # seconds between two looks at preempted requests


class EnginePause:
    """Stops and restarts stepping; requests stay where they are. Used from the coordinator's thread."""

    def __init__(self, core: Any, main: MainThread, stop: threading.Event) -> None:
        from vllm.v1.core.sched.interface import PauseState, SchedulerInterface

        require(core, "pause_scheduler", "resume_scheduler", "reset_prefix_cache")
        require(SchedulerInterface, "pause_state", "set_pause_state")
        require(PauseState, "UNPAUSED", "PAUSED_NEW", "PAUSED_ALL")
        self._core, self._main, self._stop = core, main, stop
        self._found: Any = None  # the PauseState before ours, None while we have none
        self._promised: list[Any] = []  # callbacks of somebody else's pause

    def begin(self, drain: bool = False) -> None:
        """Return once no step runs or will run; does nothing more if somebody else has stopped all steps already.

        drain: running requests end first, however long that takes, and new ones wait.
        """
        from vllm.v1.core.sched.interface import PauseState

        state = self._main.run(lambda: self._core.scheduler.pause_state)
        if state == PauseState.PAUSED_ALL:
            return
        self._found = state if self._found is None else self._found
        if drain:
            self._drain()
        else:
            self._wait(self._main.run(self._pause))

    def end(self) -> None:
        """Step again, or as far as somebody else who had paused the engine before us lets it."""
        if self._found is not None:
            self._main.run(self._restore)
        self._found = None

    def recompute(self) -> None:
        """Make running requests prefill again, images and what they generated so far included; on the engine's thread.

        RuntimeError if one of them can't be: its cache is being moved to or from elsewhere.
        """
        try:
            self._core.reset_prefix_cache(reset_running_requests=True)
        finally:  # all that ran are preempted, also where it raises
            encoder_cache.reset(self._core)

    def _drain(self) -> None:
        """Until no request is left that has tokens; vLLM neither counts preempted ones nor goes on with them meanwhile.

        So the engine steps on for those. New requests stay at the gate; one that vLLM had queued before may begin then
        and is waited for too. Where the pause is somebody else's, theirs decides when preempted ones go on.
        """
        from vllm.v1.core.sched.interface import PauseState

        while True:
            self._wait(self._main.run(lambda: self._core.pause_scheduler("wait", False)))
            if self._found != PauseState.UNPAUSED or not self._main.run(self._preempted):
                return
            self._main.run(self._core.resume_scheduler)
            while self._main.run(self._preempted):
                if self._stop.wait(_POLL):
                    raise Stopped

    def _preempted(self) -> bool:
        from vllm.v1.request import RequestStatus

        waiting = (RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KVS)
        requests = self._core.scheduler.requests.values()
        return any(request.num_output_tokens and request.status in waiting for request in requests)

    def _pause(self) -> Any:
        # Whoever waits for running requests to end would take the idle engine for that.
        callbacks = self._core._idle_state_callbacks
        self._promised += callbacks
        callbacks.clear()
        return self._core.pause_scheduler("keep", False)

    def _restore(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        if self._found == PauseState.UNPAUSED:
            self._core.resume_scheduler()
        else:
            self._core.scheduler.set_pause_state(self._found)
        self._core._idle_state_callbacks += self._promised
        self._promised = []

    def _wait(self, idle: Any) -> None:
        while isinstance(idle, Future):
            if self._stop.is_set():
                raise Stopped
            try:
                idle.result(timeout=_SLICE)
                return
            except TimeoutError:
                continue
