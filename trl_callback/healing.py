"""What a replica that refuses a version gets: the objects again, then complete weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from delta_sync.ack import Ack

Remedy = Literal["republish", "anchor"]
MAX_ANCHORS = 3  # for one case; after that only a person can help, and the wait's time-out says so


@dataclass(frozen=True)
class Refusal:
    """What one replica would not take, and what it said.

    ``served``: the version it serves meanwhile; ``attempts``: its refusals so far, where it counts them;
    ``stage_seconds``: how long its last staging took.
    """

    replica: str
    version: int
    kind: str | None
    error: str
    served: int | None = None
    attempts: int | None = None
    stage_seconds: float = 0.0


@dataclass
class _Case:
    version: int
    done_at: float
    attempts: int | None  # the replica's count when the last remedy was decided on
    anchors: int


class Healer:
    """Chooses remedies, one case a replica for as long as it goes on refusing; times are ``time.monotonic()``'s.

    The first remedy is at once: the version's objects again if they are at hand (what is damaged is then whole), else
    weights, also where no start leads to the newest version (ChainError). Still refused after that, it gets weights:
    as soon as its count of refusals rose, or once it had ``grace`` seconds and the time of two stagings. Weights that
    came for another replica get that time too, so that several with one trouble get one anchor.
    """

    def __init__(self, *, grace: float) -> None:
        self._grace = grace
        self._cases: dict[str, _Case] = {}
        self._anchored_at, self._anchored = -math.inf, -1

    def remedy(self, refusal: Refusal, *, republishable: bool, now: float) -> Remedy | None:
        """The remedy that is due, None while the last one still deserves time, or when all have been tried."""
        case = self._case(refusal)
        patience = self._grace + 2 * refusal.stage_seconds
        # An older version's anchor helps where no start is left, not with an object after it.
        helps = refusal.kind == "ChainError" or self._anchored >= refusal.version
        anchored_at = self._anchored_at if helps else -math.inf
        rested = now - anchored_at >= patience
        if case is None:
            if republishable and refusal.kind != "ChainError":
                return "republish"
            return "anchor" if rested else None
        counted = refusal.attempts is not None and case.attempts is not None and refusal.attempts > case.attempts
        had_newest = case.done_at >= anchored_at  # else an anchor came since, for another replica's sake
        due = (counted and had_newest) or (rested and now - case.done_at >= patience)
        return "anchor" if due and case.anchors < MAX_ANCHORS else None

    def applied(self, refusal: Refusal, remedy: Remedy, *, now: float) -> None:
        """Note that ``remedy``, decided on for ``refusal``, is durable."""
        case = self._case(refusal) or _Case(refusal.version, now, None, 0)
        case.done_at, case.attempts = now, refusal.attempts
        case.anchors += remedy == "anchor"
        self._cases[refusal.replica] = case

    def anchored(self, version: int, now: float) -> None:
        """Note that a version's complete weights, for whatever reason, are in the bucket."""
        self._anchored_at, self._anchored = now, version

    def recovered(self, replica: str) -> None:
        """Close the case of a replica that refuses nothing any more."""
        self._cases.pop(replica, None)

    def _case(self, refusal: Refusal) -> _Case | None:
        """The replica's open case; one whose version it serves by now is over, even if nobody saw it recover."""
        case = self._cases.get(refusal.replica)
        over = case is not None and refusal.served is not None and refusal.served >= case.version
        return None if over else case


def acknowledged_refusal(ack: Ack) -> Refusal | None:
    """What a replica's acknowledgement in the bucket says it would not take, if anything."""
    if ack.state != "refused" or ack.refused_version is None:
        return None
    return Refusal(ack.replica, ack.refused_version, ack.error_kind, f"{ack.error_kind}: {ack.error}", ack.version)
