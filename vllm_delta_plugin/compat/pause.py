"""Seam: EngineCore's pauses, and starting running requests over, for the ways in which requests meet new weights."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from vllm_delta_plugin.compat import encoder_cache
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.main_thread import MainThread, Stopped

_SLICE = 0.5  # seconds between two looks at the stop event


class EnginePause:
    """Stops and restarts stepping; requests stay where they are. Used from the coordinator's thread."""

    def __init__(self, core: Any, main: MainThread, stop: threading.Event) -> None:
        require(core, "pause_scheduler", "resume_scheduler", "is_scheduler_paused", "reset_prefix_cache")
        self._core, self._main, self._stop = core, main, stop
        self._ours = False

    def begin(self, drain: bool = False) -> None:
        """Return once no step runs or will run; does nothing more if it is paused already.

        drain: running requests end first, however long that takes, and new ones wait.
        """
        idle = self._main.run(lambda: self._pause("wait" if drain else "keep"))
        while isinstance(idle, Future):
            if self._stop.is_set():
                raise Stopped
            try:
                idle.result(timeout=_SLICE)
                return
            except TimeoutError:
                continue

    def end(self) -> None:
        """Step again, unless somebody else had paused the engine before us."""
        if self._ours:
            self._main.run(self._core.resume_scheduler)
        self._ours = False

    def recompute(self) -> None:
        """Make running requests prefill again, images and what they generated so far included; on the engine's thread.

        RuntimeError if one of them can't be: its cache is being moved to or from elsewhere.
        """
        try:
            self._core.reset_prefix_cache(reset_running_requests=True)
        finally:  # all that ran are preempted, also where it raises
            encoder_cache.reset(self._core)

    def _pause(self, mode: str) -> Any:
        if self._core.is_scheduler_paused():
            return None
        self._ours = True
        return self._core.pause_scheduler(mode, False)
