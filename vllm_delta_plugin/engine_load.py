"""Taking an anchor that is too large to stage: pause, overwrite live weights in place, verify, resume.

This is the only path on which live weights are not proven before they are touched. So the engine is paused and
reported as poisoned from before the first byte until the fresh digests of all ranks equal the manifest's.
If the load fails the engine stays paused, and the next try loads again: half-written weights never serve.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from delta_sync.errors import IntegrityError, SyncTimeoutError
from delta_sync.plan import Plan
from vllm_delta_plugin.main_thread import MainThread
from vllm_delta_plugin.proof import Layout, Proven, check_names
from vllm_delta_plugin.ranks import Ranks, first_failure
from vllm_delta_plugin.reading import Reading
from vllm_delta_plugin.staged import StageTooLargeError

TOO_LARGE = StageTooLargeError.__name__  # the kind of error with which a rank asks for this path
_POLL = 0.05  # seconds


class Pause(Protocol):
    """What stops the engine from stepping."""

    def begin(self, drain: bool = False) -> None:
        """Return once no step runs or will run; ``drain``: running requests end first."""

    def end(self) -> None:
        """Step again."""

    def recompute(self) -> None:
        """Make running requests prefill again; on the engine's thread."""


@dataclass(frozen=True)
class Loaded:
    """What the ranks then hold, what they read for it, and the seconds of pause.

    ``unsettled``: what failed once the weights were proven, if anything: making running requests prefill anew.
    """

    proven: Proven
    read: Reading
    seconds: float
    unsettled: Exception | None = None


def load_dense(
    plan: Plan, layout: Layout, main: MainThread, ranks: Ranks, timeout: float, advance: Callable[[], None]
) -> Loaded:
    """Overwrite live weights with the plan's target on every rank; the engine must be paused.

    RankError, MappingError or IntegrityError leave the weights unknown; SyncTimeoutError after ``timeout`` seconds.
    """
    check_names(layout, plan.tensors)
    started = time.monotonic()
    deadline = started + timeout
    main.run(lambda: ranks.tell("load_dense", plan))
    while True:
        replies = main.run(lambda: ranks.ask("stage_poll"))
        states = [reply.get("state") for reply in replies]
        judged = [{**reply, "ok": reply["ok"] and reply.get("state") != "failed"} for reply in replies]
        if (error := first_failure(judged)) is not None:
            raise error
        if all(state == "loaded" for state in states):
            break
        if time.monotonic() > deadline:
            raise SyncTimeoutError(
                f"loading version {plan.target.version}", expected=f"done in {timeout:g} s", got=str(states)
            )
        time.sleep(_POLL)
    main.run(advance)
    proven = Proven.of(layout, [reply["regions"] for reply in replies])
    if proven.state != plan.target.state_digest:
        raise IntegrityError(
            f"weights loaded for version {plan.target.version}",
            expected=f"state digest {plan.target.state_digest}",
            got=proven.state,
            remedy="attach the anchor again",
        )
    return Loaded(proven, Reading.of(replies), time.monotonic() - started)
