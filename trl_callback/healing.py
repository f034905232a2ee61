"""What a refused version gets next: its objects again, then complete weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trl_callback.status_client import Refusal

Remedy = Literal["republish", "anchor"]
NO_WAY = 0  # stands for the version where a replica says that no start leads to the newest one
MAX_ANCHORS = 3  # for one refused version; after that only a person can help, and the wait's time-out says so


@dataclass
class _Case:
    remedy: Remedy
    done_at: float
    attempts: int | None  # the replica's refusal count known when the remedy was in place
    anchors: int


class Healer:
    """Chooses remedies; one case a refused version, times from ``time.monotonic()``."""

    def __init__(self, *, grace: float) -> None:
        self._grace = grace
        self._cases: dict[int, _Case] = {}

    def remedy(self, refusal: Refusal, *, republishable: bool, now: float) -> Remedy | None:
        """The remedy due now, or None while the last one still deserves time, or when all have been tried.

        A version refused for the first time is published again at once (if its objects are still at hand: else
        weights); refused again after that (the replica's count rose, or ``grace`` seconds passed) it gets weights.
        """
        case = self._cases.get(refusal.version)
        if case is None:
            return "republish" if republishable and refusal.kind != "ChainError" else "anchor"
        if case.anchors >= MAX_ANCHORS or not self._refused_again(case, refusal, now):
            return None
        return "anchor"

    def forget(self, version: int) -> None:
        """Treat the next refusal of ``version`` as its first."""
        self._cases.pop(version, None)

    def applied(self, refusal: Refusal, remedy: Remedy, *, now: float) -> None:
        """Note that ``remedy`` for ``refusal`` is durable."""
        before = self._cases.get(refusal.version)
        anchors = (before.anchors if before else 0) + (remedy == "anchor")
        self._cases[refusal.version] = _Case(remedy, now, refusal.attempts, anchors)

    def _refused_again(self, case: _Case, refusal: Refusal, now: float) -> bool:
        counted = refusal.attempts is not None and case.attempts is not None and refusal.attempts > case.attempts
        return counted or now - case.done_at >= self._grace
