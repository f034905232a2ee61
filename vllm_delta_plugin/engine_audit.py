"""The background full scan: does live memory still sum up to what the manifests say?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from delta_sync.errors import IntegrityError
from vllm_delta_plugin.main_thread import MainThread
from vllm_delta_plugin.proof import Sums
from vllm_delta_plugin.ranks import RankError, Ranks, Reply, first_failure


class Auditor:
    """Starts scans, polls them without waiting, and says when commits must wait for one.

    A scan starts after half of ``commits`` or after ``period`` seconds, and must have finished once per
    ``commits`` commits. A scan that a commit crossed is done again, one that failed ``retry`` seconds later.
    """

    def __init__(self, main: MainThread, ranks: Ranks, commits: int, period: float, retry: float) -> None:
        self._main, self._ranks = main, ranks
        self._commits, self._period, self._retry = commits, period, retry
        self._finished = time.monotonic()
        self._not_before = self._finished
        self._since = 0
        self._wanted = False
        self._crossed = False
        self._again = False  # what the last scan found did not count
        self.running = False
        self.damage: IntegrityError | None = None  # found by the last scan: what is served is not what weights make
        self.copies_differ = False  # found by the last scan, on one rank: its sums don't say which copy is right
        self.span: tuple[float, float] | None = None  # unix times of the last scan that counts

    @property
    def must_finish(self) -> bool:
        """True while no further commit may happen before a scan is done."""
        return self._since >= self._commits

    def request(self) -> None:
        """Scan as soon as possible."""
        self._wanted = True

    def committed(self) -> None:
        """One more commit happened; a scan that is running may have seen bits of both versions."""
        self._since += 1
        self._crossed = self.running

    def step(self) -> list[Sums] | None:
        """Start or poll a scan; when one is done, each rank's region sums, else None. RankError if a rank cannot."""
        if not self.running:
            if self._due():
                self._begin()
            return None
        replies = self._main.run(lambda: self._ranks.ask("audit_poll"))
        if (error := first_failure(replies)) is not None:
            raise self._failed(error)
        if any(reply["state"] != "done" for reply in replies):
            return None
        if self._crossed:
            self.running, self._wanted, self._again = False, True, True
            return None
        self.running, self._again, self._since, self._finished = False, False, 0, time.monotonic()
        self.span = min(float(r["began"]) for r in replies), max(float(r["ended"]) for r in replies)
        copies = _unequal_copies(replies)
        self.damage, self.copies_differ = copies or _damage(replies), copies is not None
        return [reply["regions"] for reply in replies]

    def _begin(self) -> None:
        replies = self._main.run(lambda: self._ranks.ask("audit_begin", self._again))
        if (error := first_failure(replies)) is not None:
            raise self._failed(error)
        self.running, self._wanted, self._crossed = True, False, False

    def _failed(self, error: RankError) -> RankError:
        """Nothing is known of the weights that was not before: commits go on waiting for a scan if one was due."""
        self.running, self._wanted, self._again = False, True, True
        self._not_before = time.monotonic() + self._retry
        return error

    def _due(self) -> bool:
        now = time.monotonic()
        if now < self._not_before:
            return False
        return self._wanted or self._since * 2 >= self._commits or now - self._finished >= self._period


def _damage(replies: Sequence[Reply]) -> IntegrityError | None:
    expected, remedy = "the bits that vLLM makes of the proven weights", "making them anew"
    return _first(replies, "damaged", "what rank {} serves of module {!r}", expected, remedy)


def _unequal_copies(replies: Sequence[Reply]) -> IntegrityError | None:
    return _first(replies, "unequal", "rank {}'s copies of live region {!r}", "the same bits in each", "re-anchoring")


def _first(replies: Sequence[Reply], field: str, what: str, expected: str, remedy: str) -> IntegrityError | None:
    for rank, reply in enumerate(replies):
        if (where := reply.get(field)) is not None:
            remedy = f"something else wrote to the weights: {remedy}"
            return IntegrityError(what.format(rank, where), expected=expected, got="others", remedy=remedy)
    return None


def compare(found: Sequence[Sums], proven: Sequence[Sums]) -> IntegrityError | None:
    """The first region whose live bits are not what was proven, if any."""
    for rank, (here, there) in enumerate(zip(found, proven, strict=True)):
        for key, digest in there.items():
            if here.get(key) != digest:
                return IntegrityError(
                    f"live region {key!r} on rank {rank}",
                    expected=f"digest {digest:016x}",
                    got=f"{here.get(key, 0):016x}",
                    remedy="something else wrote to the weights: re-anchoring",
                )
    return None
