"""The background full scan: does live memory still sum up to what the manifests say?"""

from __future__ import annotations

import time
from collections.abc import Sequence

from delta_sync.errors import IntegrityError
from vllm_delta_plugin.main_thread import MainThread
from vllm_delta_plugin.proof import Sums
from vllm_delta_plugin.ranks import Ranks, Reply, first_failure


class Auditor:
    """Starts scans, polls them without waiting, and says when commits must wait for one.

    A scan starts after half of ``commits`` or after ``period`` seconds, and must have finished once per
    ``commits`` commits. A scan that a commit crossed is done again.
    """

    def __init__(self, main: MainThread, ranks: Ranks, commits: int, period: float) -> None:
        self._main, self._ranks = main, ranks
        self._commits, self._period = commits, period
        self._finished = time.monotonic()
        self._since = 0
        self._wanted = False
        self._crossed = False
        self._again = False  # what the last scan found did not count
        self.running = False
        self.damage: IntegrityError | None = None  # found by the last scan: what is served is not what weights make

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
                self._main.run(lambda: self._ranks.tell("audit_begin", self._again))
                self.running, self._wanted, self._crossed = True, False, False
            return None
        replies = self._main.run(lambda: self._ranks.ask("audit_poll"))
        if (error := first_failure(replies)) is not None:
            self._end()
            raise error
        if any(reply["state"] != "done" for reply in replies):
            return None
        if self._crossed:
            self.running, self._wanted, self._again = False, True, True
            return None
        self._end()
        self.damage = _damage(replies)
        return [reply["regions"] for reply in replies]

    def _due(self) -> bool:
        waited = time.monotonic() - self._finished
        return self._wanted or self._since * 2 >= self._commits or waited >= self._period

    def _end(self) -> None:
        self.running, self._again, self._since, self._finished = False, False, 0, time.monotonic()


def _damage(replies: Sequence[Reply]) -> IntegrityError | None:
    for rank, reply in enumerate(replies):
        if (module := reply.get("damaged")) is not None:
            return IntegrityError(
                f"what rank {rank} serves of module {module!r}",
                expected="the bits that vLLM makes of the proven weights",
                got="others",
                remedy="something else wrote to the weights: making them anew",
            )
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
