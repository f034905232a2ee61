"""Failures on demand, for tests only: config ``{"fault": {"rank": 1, "at": "commit", "times": 1}}``.

With ``"while": PATH`` instead of a number of times it fails as long as that file is there. With ``"kill": true`` the
rank's process ends there, as if the machine's memory had run out.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

POINTS = ("attach", "stage", "commit", "commit_half", "undo", "settle")


class InjectedFault(RuntimeError):
    """A test asked for this failure."""


class Faults:
    """Raises InjectedFault at the named point on the named rank, ``times`` times (default once) or ``while`` told."""

    def __init__(self, rank: int, config: Mapping[str, Any]) -> None:
        mine = bool(config) and int(config.get("rank", 0)) == rank
        self._at = str(config["at"]) if mine else None
        self._left = int(config.get("times", 1)) if mine else 0
        self._while = Path(config["while"]) if mine and "while" in config else None
        self._kill = bool(config.get("kill"))
        if self._at is not None and self._at not in POINTS:
            raise ValueError(f"fault point {self._at!r}, expected one of {POINTS}")

    def at(self, point: str) -> None:
        """Fail here if so asked."""
        if point != self._at or not (self._while.exists() if self._while else self._left > 0):
            return
        self._left -= 1
        if self._kill:
            os.kill(os.getpid(), signal.SIGKILL)
        raise InjectedFault(f"injected at {point}")
