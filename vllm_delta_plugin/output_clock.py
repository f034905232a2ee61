"""How long clients wait for a token around a commit: the time between the engine's outputs, watched for a moment."""

from __future__ import annotations

import threading
import time

_WATCHED = 2  # gaps after a commit's begin: to the first output after it, and to the next, which it may have slowed
PATIENCE = 0.25  # seconds in which those outputs come, where they come at all
_REST = 0.01  # seconds


class OutputClock:
    """Told of outputs and commits on the engine's thread; ``gap`` and ``rest`` are for the coordinator's."""

    def __init__(self) -> None:
        self._last: float | None = None  # when the last output came, while more are to come
        self._left = 0
        self._longest: float | None = None
        self._settled = threading.Event()
        self._settled.set()

    def returned(self, more: bool) -> None:
        """A batch gave tokens; ``more``: requests are left, so that the time to the next output says something."""
        now = time.perf_counter()
        if self._left and self._last is not None:
            self._longest = max(self._longest or 0.0, now - self._last)
            self._left -= 1
        self._last = now
        if not more:
            self.ended()
        elif not self._left:
            self._settled.set()

    def ended(self) -> None:
        """The last requests ended without a token, as aborted ones do: nobody waits for the next output."""
        self._last, self._left = None, 0
        self._settled.set()

    def commit(self) -> None:
        """A commit begins now: while nothing is being generated there is no gap to measure."""
        self._longest = None
        self._left = 0 if self._last is None else _WATCHED
        if self._left:
            self._settled.clear()

    @property
    def coming(self) -> bool:
        """Whether more outputs are to come."""
        return self._last is not None

    def rest(self) -> None:
        """Sleep 10 ms if more outputs are to come.

        The engine's thread shares the interpreter with this one: proof, commit and what is said of it took 1 ms more
        of the same step than the commit itself, at Qwen3-0.6B's size on an H200 (benchmarks/gpu/README.md).
        """
        if self.coming:
            time.sleep(_REST)

    def gap(self, timeout: float = PATIENCE) -> float | None:
        """The longest seconds between two outputs around the last commit; None where no two came around it.

        Waits up to ``timeout`` seconds for the outputs after it, not at all while nothing is generated.
        """
        self._settled.wait(timeout)
        return self._longest
