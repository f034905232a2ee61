"""Staging one plan on every rank in the background, and proving it before anything live is touched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from delta_sync.errors import SyncTimeoutError
from delta_sync.plan import Plan
from vllm_delta_plugin.group import Group
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.main_thread import EngineBroken, MainThread, Stopped
from vllm_delta_plugin.proof import Layout, Proven, Sums, prove
from vllm_delta_plugin.ranks import Ranks, Reply, failure, first_failure
from vllm_delta_plugin.reading import Reading

_FIRST_POLL, _LONGEST_POLL = 0.005, 0.1  # seconds; each poll costs the engine's loop a fraction of a millisecond


@dataclass(frozen=True)
class Staged:
    """A plan that every rank has staged and the proof has accepted; ``after`` is what its commit leads to.

    ``began`` is unix time; the proof took the last ``proof_seconds`` of ``seconds``.
    """

    plan: Plan
    after: Proven
    changed: int
    read: Reading
    began: float
    seconds: float
    proof_seconds: float


class Stager:
    """Drives the workers' background staging from the coordinator's thread."""

    def __init__(self, main: MainThread, ranks: Ranks, timeout: float, group: Group) -> None:
        self._main, self._ranks, self._timeout, self._group = main, ranks, timeout, group

    def stage(self, plan: Plan, layout: Layout, bases: Sequence[Sums]) -> Staged:
        """Stage and prove; on any error everything staged is dropped and live weights are as they were.

        ``bases`` are those of all ranks of all engines, which prove together.
        RankError, IntegrityError or MappingError if the plan is refused; SyncTimeoutError after ``timeout`` seconds.
        """
        began, started = time.time(), time.monotonic()
        try:
            self._main.run(lambda: self._ranks.tell("stage_begin", plan))
            replies = self._wait(plan, started + self._timeout)
            staged = time.monotonic()
            parts = self._group.exchange([reply["parts"] for reply in replies])
            after = prove(layout, bases, parts, plan.tensors, plan.target.state_digest)
        except (Stopped, EngineBroken):
            raise
        except Exception as error:
            self._group.fail(error)
            self.drop()
            raise
        changed, now = sum(int(r.get("changed") or 0) for r in replies), time.monotonic()
        return Staged(plan, after, changed, Reading.of(replies), began, now - started, now - staged)

    def drop(self) -> None:
        """Forget what is staged, if anything; of a rank that cannot only the log tells: its next staging fails."""
        error = first_failure(self._main.run(lambda: self._ranks.ask("stage_drop")))
        if error is not None:  # never in place of the error for which it is dropped
            logger.warning("delta sync: what was staged could not be dropped: %s", error)

    def _wait(self, plan: Plan, deadline: float) -> list[Reply]:
        pause = _FIRST_POLL
        while True:
            self._group.check()
            replies = self._main.run(lambda: self._ranks.ask("stage_poll"))
            states = [_state(rank, reply) for rank, reply in enumerate(replies)]
            if all(state == "staged" for state in states):
                return replies
            if time.monotonic() > deadline:
                raise SyncTimeoutError(
                    f"staging version {plan.target.version}",
                    expected=f"staged on all ranks within {self._timeout:g} s",
                    got=str(states),
                    remedy="raise stage_timeout, or look at the store's speed",
                )
            time.sleep(pause)
            pause = min(_LONGEST_POLL, pause * 1.5)


def _state(rank: int, reply: Reply) -> Any:
    error = failure(rank, {**reply, "ok": reply["ok"] and reply.get("state") != "failed"})
    if error is not None:
        raise error
    return reply.get("state")
