"""When a replica's next try begins at an anchor rather than at the weights that it serves."""

from __future__ import annotations

import time

from delta_sync.errors import ChainError, DeltaSyncError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.status import Status

_RE_ANCHORS = 2  # tries in turn to get past deleted objects before one is refused as lost
_ANCHOR_COMES = 1.0  # seconds in which the anchor of a new epoch's origin may follow it


class AnchorTurns:
    """Used from the coordinator's thread."""

    def __init__(self, ledger: Ledger, live: Live, status: Status) -> None:
        self._ledger, self._live, self._status = ledger, live, status
        self._tried = False
        self._gone = 0  # plans in turn whose objects were deleted
        self._orphan = "", 0.0  # an origin that nothing leads to, and since when

    def is_next(self) -> bool:
        """Whether to begin at one now: after a refusal, an anchor past the live version is tried in turn."""
        if self._live.lost or 0 < self._gone <= _RE_ANCHORS:
            return True
        if self._status.refusal is None or self._tried:
            return False
        return self._is_past()

    def tried(self, anchor: bool) -> None:
        """The try that was just planned begins at an anchor, or does not."""
        self._tried = anchor

    def lead_past(self) -> bool:
        """Whether an anchor leads past an object that was deleted: then nothing is refused, and the anchor is next."""
        self._gone += 1
        return self._gone <= _RE_ANCHORS and self._is_past()

    def may_come(self, newest: Manifest, error: DeltaSyncError) -> bool:
        """A new epoch's origin is visible before its anchor: for a moment that is nothing to complain of."""
        if newest.kind != "origin" or not isinstance(error, ChainError):
            return False
        if self._orphan[0] != newest.sha256:
            self._orphan = newest.sha256, time.monotonic()
        return time.monotonic() - self._orphan[1] < _ANCHOR_COMES

    def clear(self) -> None:
        """A version was taken: all is well."""
        self._tried, self._gone = False, 0

    def _is_past(self) -> bool:
        position = self._live.position
        reached = -1 if position is None else position.version
        return any(anchor.version > reached for anchor in self._ledger.anchors())
