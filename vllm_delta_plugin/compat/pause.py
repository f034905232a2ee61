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
        self._found: Any = None  # the PauseState that others want, None while we have no pause of our own
        self._promised: list[Any] = []  # callbacks of somebody else's pause

    def begin(self, drain: bool = False) -> None:
        """Return once no step runs or will run; does nothing more if somebody else has stopped all steps already.

        What others set meanwhile takes effect at ``end``. drain: running requests end first, however long that takes,
        and new ones wait.
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
        """Until no request has begun and not ended; vLLM neither counts preempted ones nor goes on with them meanwhile.

        So the engine steps on for those. New requests stay at the gate; one that vLLM had queued before may begin then
        and is waited for too. Where the pause is somebody else's, theirs decides when preempted ones go on.
        """
        while True:
            self._wait(self._main.run(lambda: self._core.pause_scheduler("wait", False)))
            if self._main.run(self._drained):
                return
            while self._main.run(self._preempted):
                if self._stop.wait(_POLL):
                    raise Stopped

    def _drained(self) -> bool:
        """Whether all have ended; from then on the pause holds, else the engine steps on."""
        from vllm.v1.core.sched.interface import PauseState

        if self._core.scheduler.pause_state == PauseState.UNPAUSED:  # somebody's /resume meanwhile
            self._found = PauseState.UNPAUSED
            return False
        if self._found == PauseState.UNPAUSED and self._preempted():
            self._core.resume_scheduler()
            return False
        self._hold()
        return True

    def _preempted(self) -> bool:
        from vllm.v1.request import RequestStatus

        waiting = (RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KVS)
        requests = self._core.scheduler.requests.values()
        # Without tokens only its images are of the old weights: a preempted request keeps them (cache_salt.py).
        return any((r.num_output_tokens or r.mm_features) and r.status in waiting for r in requests)

    def _pause(self) -> Any:
        # Whoever waits for running requests to end would take the idle engine for that.
        callbacks = self._core._idle_state_callbacks
        self._promised += callbacks
        callbacks.clear()
        idle = self._core.pause_scheduler("keep", False)
        self._hold()
        return idle

    def _hold(self) -> None:
        def later(state: Any) -> None:
            self._found = state

        self._core.scheduler.set_pause_state = later  # of this object: in a pause of ours nobody may use weights

    def _restore(self) -> None:
        from vllm.v1.core.sched.interface import PauseState

        vars(self._core.scheduler).pop("set_pause_state", None)
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
