"""Waiting before the next try: after a refusal, a rollback or a store error; at once if the store shows a change."""

from __future__ import annotations

import time
from collections.abc import Hashable

_FIRST = 0.25  # seconds


class Hold:
    """Doubles the pause from 0.25 s to ``longest``; ends early when ``signal`` is not the one given to ``start``."""

    def __init__(self, longest: float) -> None:
        self._longest = longest
        self._pause = 0.0
        self._until = 0.0
        self._signal: Hashable = None

    @property
    def active(self) -> bool:
        """True from the first failure until ``clear``."""
        return self._pause > 0

    def start(self, signal: Hashable = None) -> None:
        """A try failed while the store looked like ``signal``."""
        self._pause = min(self._longest, self._pause * 2 or _FIRST)
        self._until = time.monotonic() + self._pause
        self._signal = signal

    def hurry(self) -> None:
        """Whatever the next try was to wait for, it may be now."""
        self._until = 0.0

    def over(self, signal: Hashable = None) -> bool:
        """True if it is time for the next try."""
        if not self.active or time.monotonic() >= self._until:
            return True
        return self._signal is not None and signal != self._signal

    def clear(self) -> None:
        """All is well."""
        self._pause = 0.0
