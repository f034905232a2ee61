"""Bounded, jittered retries under one deadline."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from typing import TypeVar

from delta_sync.errors import StoreError

Result = TypeVar("Result")
log = logging.getLogger(__name__)

TRIES = 6
FIRST_PAUSE = 0.25  # seconds; doubled from try to try
LONGEST_PAUSE = 8.0


class Deadline:
    """A point in time that everything done for one call has to meet."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left(self) -> float:
        """Seconds until then; negative afterwards."""
        return self._end - time.monotonic()


class Again(Exception):
    """The attempt failed in a way that may pass; ``after``: seconds that the other side asks to wait."""

    def __init__(self, error: StoreError, after: float = 0.0) -> None:
        super().__init__(str(error))
        self.error, self.after = error, after


def retrying(deadline: Deadline, attempt: Callable[[], Result]) -> Result:
    """What ``attempt`` returns, tried again while it raises Again; then its StoreError."""
    pause = FIRST_PAUSE
    for number in range(1, TRIES + 1):
        try:
            return attempt()
        except Again as again:
            wait = again.after + pause * random.uniform(0.5, 1.5)
            if number == TRIES or wait >= deadline.left:
                raise again.error from again.__cause__
            log.debug("again in %.2f s: %s", wait, again.error)
        time.sleep(wait)
        pause = min(2 * pause, LONGEST_PAUSE)
    raise AssertionError("unreachable")
