"""Asking the Hub while one waits for something: what fails on the way matters only once time is over."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

import httpx2
from huggingface_hub.errors import HfHubHTTPError

PASSING = (408, 425, 429)  # refusals of the Hub that pass
T = TypeVar("T")


class Patience:
    """Asks the Hub about one Space until the deadline, whatever fails on the way; each failure is said once."""

    def __init__(self, repo: str, deadline: float, say: Callable[[str], None]) -> None:
        self.repo, self.deadline, self.say = repo, deadline, say
        self.said: set[str] = set()

    def ask(self, call: Callable[[], T]) -> T | None:
        """What ``call`` returns, None if it failed for now; raises what waiting does not cure, or once time is over."""
        try:
            return call()
        except (httpx2.HTTPError, OSError) as error:  # the Hub's own, too
            answer = error.response if isinstance(error, HfHubHTTPError) else None
            lasting = answer is not None and answer.status_code < 500 and answer.status_code not in PASSING
            if lasting or time.monotonic() >= self.deadline:
                raise
            trouble = f"HTTP {answer.status_code}" if answer is not None else f"{type(error).__name__} ({error})"
            if trouble not in self.said:
                self.said.add(trouble)
                self.say(f"{self.repo}: {trouble}, asking again")
            return None
