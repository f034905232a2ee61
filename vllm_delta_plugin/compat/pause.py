"""Seam: EngineCore's pause that keeps requests, for the one case in which live weights are overwritten in place."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.main_thread import MainThread, Stopped

_SLICE = 0.5  # seconds between two looks at the stop event


class EnginePause:
    """Stops and restarts stepping; requests stay where they are. Used from the coordinator's thread."""

    def __init__(self, core: Any, main: MainThread, stop: threading.Event) -> None:
        require(core, "pause_scheduler", "resume_scheduler", "is_scheduler_paused")
        self._core, self._main, self._stop = core, main, stop
        self._ours = False

    def begin(self) -> None:
        """Return once no step runs or will run; does nothing more if it is paused already."""
        idle = self._main.run(self._pause)
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

    def _pause(self) -> Any:
        if self._core.is_scheduler_paused():
            return None
        self._ours = True
        return self._core.pause_scheduler("keep", False)
