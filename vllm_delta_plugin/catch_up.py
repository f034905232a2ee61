"""Catching up with the newest version: plan a way and take it; refuse what can't be taken, and fall back."""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial

from delta_sync.errors import ChainError, DeltaSyncError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.anchor_turns import AnchorTurns
from vllm_delta_plugin.control import Control
from vllm_delta_plugin.damaged_anchors import NO_WAY, DamagedAnchors, NotTaken
from vllm_delta_plugin.fallback import Fallback
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.lookout import Lookout
from vllm_delta_plugin.ranks import kind_of
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.store_clock import StoreClock
from vllm_delta_plugin.taker import Taker

_GONE = "NotFoundError"  # a rank's error: an object of the plan was deleted, by retention or by accident


def is_of_sums(error: DeltaSyncError) -> bool:
    """Whether all objects are whole, yet don't lead to the published bits: wrong ones, or added to wrong bits."""
    return kind_of(error) == "IntegrityError" and getattr(error, "object_key", None) is None


class CatchUp:
    """Used from the coordinator's thread. Its methods say whether another version is served now than before."""

    def __init__(
        self,
        ledger: Ledger,
        live: Live,
        status: Status,
        report: Reporter,
        taker: Taker,
        damaged: DamagedAnchors,
        control: Control,
        lookout: Lookout,
        hold: Hold,
        clock: StoreClock,
    ) -> None:
        self._ledger, self._live, self._status, self._report = ledger, live, status, report
        self._damaged, self._control, self._lookout, self._hold = damaged, control, lookout, hold
        self._clock = clock
        self._fallback = Fallback(ledger, live, status, taker, damaged)
        self._anchors = AnchorTurns(ledger, live, status)
        self._searched: Hashable = None  # what the store looked like, and where that led: not searched again

    def go(self, newest: Manifest) -> bool:
        """Try to serve the newest version, or the one that an operator holds; RolledBack if a rank failed to commit.

        Once more for each damaged anchor that only the search for something older brought to light.
        """
        self._damaged.forget()
        anchor, moved = self._anchors.is_next(), False
        while True:
            try:
                failed = self._damaged.take(partial(self._plan, newest, anchor))
            except NO_WAY as error:
                return self._no_way(newest, error) or moved
            if failed is None:
                self.arrived()
                self._report.nothing_refused()
                return True
            known = self._damaged.found
            moved = self._failed(failed) or moved
            if self._damaged.found == known:
                return moved
            anchor = False

    def cannot_read_newest(self, error: DeltaSyncError) -> bool:
        """The newest version's manifest, or what HEAD says of it, is damaged: a refusal, so that it is healed."""
        top, live = self._ledger.highest_listed(), self._live.position
        if top is None or (live is not None and top.manifest == live.manifest):
            raise error
        self._status.saw(top.version)
        self._report.unreadable(top, error)
        self._damaged.forget()
        return self._hold.over() and self._fall_back(top, None, error)

    def arrived(self) -> None:
        """What was asked for is served: there is nothing to wait for any more."""
        self._hold.clear()
        self._anchors.clear()

    def _plan(self, newest: Manifest, anchor: bool, without: frozenset[AnchorRef]) -> Plan | None:
        """The way there, None if it is served already; raises NO_WAY."""
        anchor = anchor or self._live.lost
        try:
            with self._clock.asking(f"planning the way to version {newest.version}"):
                plan = self._ledger.plan(
                    self._live.position,
                    self._live.state_digest,
                    prefer_anchor=anchor,
                    use_folds=self._status.refusal is None,
                    target=self._control.target,
                    newest=newest,
                    without=without,
                )
        except NO_WAY:
            self._anchors.tried(anchor)
            raise
        self._anchors.tried(plan is not None and plan.start == "anchor")
        if without and plan is not None and self._comes_by(plan):
            raise ChainError(
                f"way to version {plan.target.version} without that anchor",
                expected="another anchor past the version that is served",
                got=f"only that of version {plan.anchor and plan.anchor.version}",
                remedy="attach an anchor to the newest version",
            )
        return plan

    def _comes_by(self, plan: Plan) -> bool:
        """Whether a plan from an anchor leads over what is served: from there on it is the chain, tried in turn."""
        at = None if self._live.lost else self._live.position
        if at is None or plan.anchor is None:
            return False
        return at.manifest in {
            plan.anchor.manifest,
            *(step.sha256 for step in plan.deltas if isinstance(step, Manifest)),
        }

    def _no_way(self, newest: Manifest, error: DeltaSyncError) -> bool:
        wanted = self._control.target or newest
        if self._anchors.may_come(newest, error):
            self._hold.start(self._lookout.signal(wanted.sha256))
            return False
        self._report.no_way(wanted, error)
        return self._fall_back(Position(wanted.version, wanted.sha256), None, error)

    def _failed(self, failed: NotTaken) -> bool:
        is_gone = kind_of(failed.error) == _GONE
        if is_gone and not self._live.lost and self._anchors.lead_past():
            self._report.passed_by(failed.plan, failed.error)
            return False
        news = self._report.refused(failed.plan, failed.error, failed.text)
        if news and is_of_sums(failed.error):
            self._live.request_audit()
        return self._fall_back(failed.plan.position, failed.plan, failed.error)

    def _fall_back(self, refused: Position, plan: Plan | None, error: DeltaSyncError) -> bool:
        """Wait for a remedy, serving the newest version before the refused one that can be proven."""
        signal, moved = self._lookout.signal(refused.manifest), False
        if self._control.target is None and (signal, self._live.position) != self._searched:
            moved = self._fallback.take(refused.version, plan, error)
            self._searched = signal, self._live.position
        self._hold.start(signal)
        return moved
