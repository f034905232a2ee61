"""Taking a version although an anchor on the way turns out to be damaged: by an older one and the deltas after it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, MappingError
from delta_sync.ledger import AnchorRef
from delta_sync.plan import Plan
from delta_sync.store.keys import anchor_folder
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.ranks import RankError, is_transient, kind_of
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.taker import Taker

NO_WAY = (ChainError, FormatError, IntegrityError)  # what a plan fails with until somebody repairs the run
_DAMAGE = {"FormatError", "IntegrityError", "NotFoundError"}
Way = Callable[[frozenset[AnchorRef]], Plan | None]  # a plan without these anchors; raises NO_WAY


@dataclass(frozen=True)
class NotTaken:
    """The plan that failed, with what; ``other``: why nothing leads around its anchor, if that is what is damaged."""

    plan: Plan
    error: DeltaSyncError
    other: DeltaSyncError | None = None

    @property
    def text(self) -> str:
        """What to say of it."""
        return str(self.error) if self.other is None else f"{self.error}. No other way: {self.other}"


class DamagedAnchors:
    """Those that were found since ``forget``. Used from the coordinator's thread."""

    def __init__(self, taker: Taker, report: Reporter) -> None:
        self._taker, self._report = taker, report
        self.found: frozenset[AnchorRef] = frozenset()

    def forget(self) -> None:
        """What was damaged may be whole by now."""
        self.found = frozenset()

    def take(self, way: Way) -> NotTaken | None:
        """Serve the target of the plan that ``way`` gives, else say what stood in the way; None too if it gives none.

        Raises what ``way`` raises to begin with, and of Taker.take what says nothing about a version.
        """
        failed: NotTaken | None = None
        while True:
            try:
                plan = way(self.found)
            except NO_WAY as error:
                if failed is None:
                    raise
                return NotTaken(failed.plan, failed.error, error)
            if plan is None:
                return None
            if failed is not None:
                self.report(failed.plan, failed.error)
            try:
                self._taker.take(plan)
            except (RankError, IntegrityError, MappingError) as error:
                if isinstance(error, RolledBack) or is_transient(error):
                    raise
                failed = NotTaken(plan, error)
                if not self.blame(plan, error):
                    return failed
            else:
                return None

    def blame(self, plan: Plan, error: DeltaSyncError) -> bool:
        """Whether it is the anchor that the plan begins at which failed: then it is found, and to be left out."""
        anchor, known = plan.anchor, self.found
        if anchor is not None and is_of_anchor(plan, error):
            self.found |= {AnchorRef(anchor.version, anchor.epoch)}
        return self.found != known

    def report(self, plan: Plan, error: DeltaSyncError) -> None:
        """Say that the version is tried without the plan's anchor, and why."""
        if plan.anchor is not None:
            self._report.anchor_left_out(error, f"the anchor of version {plan.anchor.version} is left out")


def is_of_anchor(plan: Plan, error: DeltaSyncError) -> bool:
    """Whether the anchor of a plan is damaged: one of its objects or, with nothing on top of it, its content."""
    kind = kind_of(error)
    if plan.anchor is None or kind not in _DAMAGE:
        return False
    if getattr(error, "object_key", None) is None:
        return kind == "IntegrityError" and not plan.deltas
    return names_anchor(plan, error)


def names_anchor(plan: Plan, error: DeltaSyncError) -> bool:
    """Whether an error is about an object of the anchor that a plan begins at."""
    anchor, key = plan.anchor, getattr(error, "object_key", None)
    return anchor is not None and key is not None and key.startswith(anchor_folder(anchor.version, anchor.epoch))
