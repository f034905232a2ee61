"""Looking at the store: what is newest, and whether it is time to do something about it."""

from __future__ import annotations

import threading
import time
from collections.abc import Hashable

from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.store_clock import StoreClock

BUSY_TURN = 0.05  # seconds one look may take while a scan runs or a client waits
_TURN = 1.0  # the same while there is nothing else to do


class Lookout:
    """Used from the coordinator's thread, but for ``wake`` and ``hurry``."""

    def __init__(
        self, config: ReplicaConfig, ledger: Ledger, live: Live, status: Status, hold: Hold, clock: StoreClock
    ) -> None:
        self._config, self._ledger, self._live, self._status, self._hold = config, ledger, live, status, hold
        self._clock = clock
        self._wake = threading.Event()  # ends a look early

    def look(self, pinned: Manifest | None, busy: bool) -> Manifest | None:
        """The newest version if there is something to do about it; returns within a second.

        ``pinned``: the version to hold, if one is held; ``busy``: others wait for their turn.
        """
        with self._clock.asking("looking for a newer version"):
            return self._look(pinned, BUSY_TURN if busy else _TURN)

    def _look(self, pinned: Manifest | None, seconds: float) -> Manifest | None:
        try:
            if self._hold.active or pinned is not None:
                self._wake.wait(min(seconds, self._config.poll))
                newest = self._ledger.head()
            else:
                newest = self._ledger.wait_newer(
                    self._live.position, time.monotonic() + seconds, self._wake, poll_seconds=self._config.poll
                )
        finally:  # else no look would wait any more while the store fails
            self._wake.clear()
        self._status.update(looked_at=time.time())
        if newest is None:
            return None
        self._status.saw(newest.version, newest.created_at)
        if self._hold.active and not self._hold.over(self.signal((pinned or newest).sha256)):
            return None
        return None if self._is_at(pinned) else newest

    def _is_at(self, pinned: Manifest | None) -> bool:
        at = self._live.position
        return pinned is not None and at is not None and at.manifest == pinned.sha256

    def signal(self, manifest: str) -> Hashable:
        """What a publisher's remedy would change: a newer version or another anchor."""
        return manifest, tuple((a.version, a.epoch) for a in self._ledger.anchors())

    def wake(self) -> None:
        """End a look that is going on: there is something else to do."""
        self._wake.set()

    def hurry(self) -> None:
        """Look at once, whatever is waited for."""
        self._hold.hurry()
        self._wake.set()
