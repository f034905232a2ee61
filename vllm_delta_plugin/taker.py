"""Making a plan live, whichever way it needs, and reporting it; what stands in the way is raised."""

from __future__ import annotations

from functools import partial

from delta_sync.errors import SyncTimeoutError
from delta_sync.plan import Plan
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.engine_load import TOO_LARGE
from vllm_delta_plugin.engine_stage import Staged
from vllm_delta_plugin.group import PeerError
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.ranks import RankError
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Status


class Taker:
    """Used from the coordinator's thread."""

    def __init__(self, live: Live, status: Status, report: Reporter) -> None:
        self._live, self._status, self._report = live, status, report

    def take(self, plan: Plan) -> None:
        """Return once the plan's target is served.

        RankError, IntegrityError or MappingError if it is refused (live weights are as before, unless ``live.lost``);
        RolledBack if it could not be committed; SyncTimeoutError.
        """
        for error in plan.damaged:
            self._report.anchor_left_out(error, "an anchor is left out")
        self._live.check(plan)
        try:
            self._take(plan)
        except RolledBack as error:
            self._report.rolled_back(error, self._live.generation)
            raise

    def _take(self, plan: Plan) -> None:
        if self._live.lost:
            self._load(plan)
        elif plan.start != "anchor" and not plan.deltas and not self._live.changes_what_is_served(plan):
            self._adopt(plan)
        else:
            self._stage(plan)

    def _stage(self, plan: Plan) -> None:
        try:
            staged = self._live.stage(plan)
        except RankError as error:
            if error.kind != TOO_LARGE or plan.start != "anchor":
                raise
            self._load(plan)
        else:
            self._commit(staged)

    def _commit(self, staged: Staged) -> None:
        self._status.update(staged=staged.plan.target.version)
        try:
            committed = self._live.commit(staged, partial(self._report.committed, staged))
        except RolledBack:
            self._live.drop()
            self._live.request_audit()
            raise
        except (SyncTimeoutError, PeerError):  # an engine that shares experts was late, or failed
            self._live.drop()
            raise
        finally:
            self._status.update(staged=None)
        self._live.outputs.rest()
        self._report.log_commit(staged, committed)

    def _load(self, plan: Plan) -> None:
        """Take an anchor that is too large to stage; until that succeeds nothing is served."""
        self._live.refuse_load(plan)
        self._status.unproven()
        logger.info("delta sync: pausing to load version %d in place", plan.target.version)
        loaded = self._live.load(plan)
        if loaded.unsettled is not None:
            self._status.note_error(loaded.unsettled)
        self._report.loaded(plan.target, loaded, self._live.generation)

    def _adopt(self, plan: Plan) -> None:
        """The live bits already are the target's: nothing to write, nothing to forget."""
        self._live.adopt(plan)
        self._report.adopted(plan.target, self._live.generation)
