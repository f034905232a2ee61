"""Saying what happened: in status, in one log line, and as an acknowledgement in the bucket."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

from delta_sync.ack import Ack, State
from delta_sync.errors import DeltaSyncError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.engine_commit import Committed
from vllm_delta_plugin.engine_load import Loaded
from vllm_delta_plugin.engine_stage import Staged
from vllm_delta_plugin.group import Group
from vllm_delta_plugin.live import adapter_of
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.ranks import RankError, kind_of
from vllm_delta_plugin.status import Refusal, Served, Status
from vllm_delta_plugin.store_clock import StoreClock
from vllm_delta_plugin.taken import Taken, trace_refusal

_REMEMBERED = 100  # most errors of anchors that are not said again
# Seconds between the output that a commit may have delayed and the acknowledgement: what that takes of the interpreter
# would delay the same output, which the engine is still handing on.
_NOT_AT_ONCE = 0.05


class Reporter:
    """Used from the coordinator's thread, but for ``committed``, which the engine's calls while that one waits.

    An acknowledgement that cannot be written is reported, never fatal.

    What was taken is acknowledged by ``acknowledge``, everything else at once. ``gap`` waits a moment for the engine's
    next outputs and says how long the longest was away.
    """

    def __init__(
        self,
        ledger: Ledger,
        status: Status,
        acknowledge: bool,
        gap: Callable[[], float | None],
        clock: StoreClock,
        group: Group,
    ) -> None:
        self._ledger, self._status, self._wanted, self._gap, self._clock = ledger, status, acknowledge, gap, clock
        self._group = group
        self._taken: Taken | None = None  # and not acknowledged yet
        self._left_out: set[str] = set()  # what was said of anchors

    def committed(self, staged: Staged, committed: Committed, generation: int) -> None:
        """A staged plan is live on all ranks; ``log_commit`` says so a moment later."""
        counters = self._status.counters
        counters.commits += 1
        counters.anchors_taken += staged.plan.start == "anchor"
        counters.changed_elements_last = staged.changed
        counters.commit_ms_last, counters.stage_seconds_last = committed.milliseconds, staged.seconds
        counters.committed_at_last = committed.at
        sighting = self._status.sighting(staged.plan.target.version)
        seconds = committed.milliseconds / 1e3
        self._taken = Taken(staged.plan.target, sighting, staged.read, staged, seconds, committed.at)
        if committed.unsettled is not None:
            self._status.note_error(committed.unsettled)
        self._status.update(staged=None)
        self._serves(staged.plan.target, generation)  # last: who sees the version sees all of this

    def log_commit(self, staged: Staged, committed: Committed) -> None:
        """A line in the log."""
        what = "with its LoRA adapter, " if staged.plan.target.kind == "adapter" else ""
        how = f"from {staged.plan.start}, {what}{staged.changed} elements changed, "
        how += f"staged in {staged.seconds:.2f} s, committed in {committed.milliseconds:.2f} ms"
        _log(staged.plan.target, how)

    def loaded(self, target: Manifest, loaded: Loaded, generation: int) -> None:
        """An anchor was loaded in place."""
        sighting = self._status.sighting(target.version)
        self._taken = Taken(target, sighting, loaded.read, commit_seconds=loaded.seconds)
        self._status.counters.commits += 1
        self._status.counters.anchors_taken += 1
        self._serves(target, generation)
        _log(target, f"loaded from its anchor, paused for {loaded.seconds * 1e3:.0f} ms")

    def adopted(self, target: Manifest, generation: int) -> None:
        """The live bits were the target's already."""
        self._taken = Taken(target, self._status.sighting(target.version))
        self._serves(target, generation)
        _log(target, "live bits are this version's")

    def rolled_back(self, error: RankError, generation: int) -> None:
        """A rank failed to commit and every rank is back on the old version."""
        self._status.served.commit_generation = generation
        self._status.note_error(error, kind=f"RolledBack/{error.kind}")
        self._status.measures.failed("RolledBack")
        self._status.counters.rollbacks += 1  # last: who sees the count sees why

    def refused(self, plan: Plan, error: DeltaSyncError, text: str) -> bool:
        """Staging or its proof failed; the version that the failing object belongs to is named. Whether it is news."""
        kind = kind_of(error)
        key = error.object_key if isinstance(error, RankError) else None
        guilty = next((m for m in plan.deltas if any(o.key == key for o in m.objects)), plan.target)
        sha256 = guilty.sha256 if isinstance(guilty, Manifest) else guilty.manifest
        target = plan.target
        new = self.refuse(Refusal(guilty.version, sha256, key, kind, text))
        if new:
            trace_refusal(target, self._status.sighting(target.version), self._status.facts.replica, kind)
        return new

    def nothing_refused(self) -> None:
        """The newest version is served; if one is refused still, it is not there any more."""
        if self._status.accept():
            self._group.refuse(None)
            self._acknowledge()

    def passed_by(self, plan: Plan, error: DeltaSyncError) -> None:
        """Old versions were deleted while this replica was on its way over them: it takes an anchor instead."""
        what = f"on the way to version {plan.target.version} an object was deleted, taking an anchor instead: {error}"
        self._status.note_error(DeltaSyncError(what), kind="NotFoundError")
        self._status.measures.failed("NotFoundError")

    def anchor_left_out(self, error: DeltaSyncError, what: str) -> None:
        """Another way is taken, so this is no refusal; counted once, until it is another error."""
        text = f"{what}: {error}"
        if text in self._left_out:
            return
        if len(self._left_out) == _REMEMBERED:
            self._left_out.clear()
        self._left_out.add(text)
        kind = kind_of(error)
        self._status.note_error(DeltaSyncError(text), kind=kind)
        self._status.measures.failed(kind)

    def no_way(self, newest: Manifest, error: DeltaSyncError) -> None:
        """No plan leads to the newest version."""
        self.refuse(Refusal(newest.version, newest.sha256, None, type(error).__name__, str(error)))

    def unreadable(self, newest: Position, error: DeltaSyncError) -> None:
        """The newest version's manifest can't be read or is not the one it should be."""
        self.refuse(Refusal(newest.version, newest.manifest, None, type(error).__name__, str(error)))

    def poisoned(self, error: DeltaSyncError, state_digest: str | None) -> None:
        """Live memory is not what was proven."""
        self._status.unproven(state_digest)
        self._status.measures.failed(type(error).__name__)
        self._status.note_error(error)
        self._acknowledge()

    def _serves(self, target: Manifest, generation: int) -> None:
        if (run := self._status.served.run) not in (None, target.run):
            logger.warning("delta sync: the store holds run %s now, no longer %s", target.run, run)
        place = (target.run, target.version, target.epoch, target.sha256, target.state_digest, generation)
        self._status.serves(Served(*place, adapter_of(target)))

    def acknowledge(self) -> None:
        """Say in the bucket what was taken since the last time, if anything, and what it took."""
        taken, self._taken = self._taken, None
        if taken is None:
            return
        gap = None if taken.staged is None else self._gap()
        if gap is not None:
            time.sleep(_NOT_AT_ONCE)
        performance = taken.performance(gap)
        self._status.update(performance=performance)
        measures = self._status.measures
        measures.committed(performance, taken.staged.changed if taken.staged else 0)
        taken.trace(self._status.facts.replica, gap)
        self._acknowledge()

    def refuse(self, refusal: Refusal) -> bool:
        """Whether it is news."""
        before, new = self._status.refusal, self._status.refuse(refusal)
        if (now := self._status.refusal) is not None and now != before:
            self._group.refuse(asdict(now))
        if new:
            self._status.measures.failed(refusal.kind)
            self._acknowledge()
        return new

    def _acknowledge(self) -> None:
        if not self._wanted:
            return
        served, refusal = self._status.served, self._status.refusal
        ack = Ack(
            replica=self._status.facts.replica,
            version=served.version,
            manifest=served.manifest,
            epoch=served.epoch,
            state=cast(State, self._status.state),  # never "waiting": there was a commit, a refusal or a poisoning
            refused_version=refusal.version if refusal else None,
            refused_object=refusal.object if refusal else None,
            error_kind=refusal.kind if refusal else None,
            error=refusal.error if refusal else None,
            time=time.time(),
            performance=self._status.performance,
        )
        try:
            with self._clock.asking("writing an acknowledgement"):
                self._ledger.acknowledge(ack)
        except StoreError as error:
            self._status.note_error(error)


def _log(target: Manifest, how: str) -> None:
    logger.info("delta sync: serving version %d (%s)", target.version, how)
