"""Asking a replica for its status again and again, and noting when its version changed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Any, Self

import httpx


@dataclass(frozen=True)
class Commit:
    """The served version became `version` after `before` and not later than `after` (unix seconds)."""

    version: int
    before: float
    after: float


class StatusWatcher:
    """Polls GET /delta_sync/status in a thread every `period` seconds; a failed poll is counted and tried again."""

    def __init__(self, url: str, period: float = 0.1, api_key: str | None = None) -> None:
        self._url, self._period = f"{url}/delta_sync/status", period
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="status", daemon=True)
        self.status: dict[str, Any] = {}
        self.commits: list[Commit] = []
        self.failed_polls = 0

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stop.set()
        self._thread.join(timeout=35)

    @property
    def version(self) -> int | None:
        return self.status.get("version")

    def _run(self) -> None:
        with httpx.Client(timeout=30, trust_env=False, headers=self._headers) as client:
            last_poll = time.time()
            while not self._stop.wait(self._period):
                asked = time.time()
                try:
                    response = client.get(self._url)
                    status = response.raise_for_status().json()
                except (httpx.HTTPError, ValueError):  # a proxy in between may answer with a page
                    self.failed_polls += 1
                    continue
                self._take(status, last_poll, time.time())
                last_poll = asked

    def _take(self, status: dict[str, Any], before: float, after: float) -> None:
        version = status.get("version")
        if self.status and version is not None and version != self.version:
            self.commits.append(Commit(version, before, after))
        self.status = status
