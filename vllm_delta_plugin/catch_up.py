"""Catching up with the newest version: plan a way and take it; refuse what can't be taken, and fall back."""

from __future__ import annotations

from collections.abc import Hashable

from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, MappingError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.anchor_turns import AnchorTurns
from vllm_delta_plugin.control import Control
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.fallback import Fallback
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.lookout import Lookout
from vllm_delta_plugin.ranks import RankError, is_transient
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.taker import Taker

NO_WAY = (ChainError, FormatError, IntegrityError)  # what a plan fails with until somebody repairs the run
_GONE = "NotFoundError"  # a rank's error: an object of the plan was deleted, by retention or by accident


class CatchUp:
    """Used from the coordinator's thread. Its methods say whether another version is served now than before."""

    def __init__(
        self,
        ledger: Ledger,
        live: Live,
        status: Status,
        report: Reporter,
        taker: Taker,
        control: Control,
        lookout: Lookout,
        hold: Hold,
    ) -> None:
        self._ledger, self._live, self._status, self._report = ledger, live, status, report
        self._taker, self._control, self._lookout, self._hold = taker, control, lookout, hold
        self._fallback = Fallback(ledger, live, status, taker)
        self._anchors = AnchorTurns(ledger, live, status)
        self._searched: Hashable = None  # what the store looked like, and where that led: not searched again

    def go(self, newest: Manifest) -> bool:
        """One try to serve the newest version, or the one that an operator holds."""
        plan, error = self._plan(newest)
        if error is not None:
            return self._no_way(newest, error)
        return plan is not None and self._take(plan)

    def cannot_read_newest(self, error: DeltaSyncError) -> bool:
        """The newest version's manifest, or what HEAD says of it, is damaged: a refusal, so that it is healed."""
        top, live = self._ledger.highest_listed(), self._live.position
        if top is None or (live is not None and top.manifest == live.manifest):
            raise error
        self._status.saw(top.version)
        self._report.unreadable(top, error)
        return self._hold.over() and self._fall_back(top, None, error)

    def arrived(self) -> None:
        """What was asked for is served: there is nothing to wait for any more."""
        self._hold.clear()
        self._anchors.clear()

    def _plan(self, newest: Manifest) -> tuple[Plan | None, DeltaSyncError | None]:
        """The way there, None if it is served already; or what stands in the way."""
        anchor = self._anchors.is_next()
        try:
            with self._lookout.asking():
                plan = self._ledger.plan(
                    self._live.position,
                    self._live.state_digest,
                    prefer_anchor=anchor,
                    use_folds=self._status.refusal is None,
                    target=self._control.target,
                    newest=newest,
                )
        except NO_WAY as error:
            self._anchors.tried(anchor)
            return None, error
        self._anchors.tried(plan is not None and plan.start == "anchor")
        if plan is None:
            self._hold.clear()
        return plan, None

    def _no_way(self, newest: Manifest, error: DeltaSyncError) -> bool:
        if self._anchors.may_come(newest, error):
            self._hold.start(self._lookout.signal(newest.sha256))
            return False
        self._report.no_way(newest, error)
        return self._fall_back(Position(newest.version, newest.sha256), None, error)

    def _take(self, plan: Plan) -> bool:
        try:
            self._taker.take(plan)
        except RolledBack:
            self._hold.start()
        except RankError as error:
            if is_transient(error):
                raise
            if error.kind == _GONE and not self._live.lost and self._anchors.leads_past():
                self._report.passed_by(plan, error)
            else:
                return self._refuse(plan, error)
        except (IntegrityError, MappingError) as error:
            return self._refuse(plan, error)
        else:
            self.arrived()
            return True
        return False

    def _refuse(self, plan: Plan, error: DeltaSyncError) -> bool:
        self._report.refused(plan, error)
        return self._fall_back(plan.position, plan, error)

    def _fall_back(self, refused: Position, plan: Plan | None, error: DeltaSyncError) -> bool:
        """Wait for a remedy, serving the newest version before the refused one that can be proven."""
        signal, served = self._lookout.signal(refused.manifest), False
        if self._control.target is None and (signal, self._live.position) != self._searched:
            served = self._fallback.take(refused.version, plan, error)
            self._searched = signal, self._live.position
        self._hold.start(signal)
        return served
