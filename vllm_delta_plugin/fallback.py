"""The newest version can't be taken: the search for the newest one before it that can be proven."""

from __future__ import annotations

from collections.abc import Collection

from delta_sync.errors import DeltaSyncError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.plan import Plan
from vllm_delta_plugin.damaged_anchors import NO_WAY, DamagedAnchors, is_of_anchor, names_anchor
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.ranks import is_transient, kind_of
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.taker import Taker

_TRIES = 64  # for one refusal; what is further down than that waits for the writer's remedy


class Fallback:
    """Used from the coordinator's thread."""

    def __init__(self, ledger: Ledger, live: Live, status: Status, taker: Taker, damaged: DamagedAnchors) -> None:
        self._ledger, self._live, self._status, self._taker, self._damaged = ledger, live, status, taker, damaged

    def take(self, refused: int, plan: Plan | None, error: DeltaSyncError) -> bool:
        """Serve the newest version before ``refused`` that can be proven, if it is newer; whether there was one.

        ``error`` came on the way of ``plan`` or, without one, before there was any. The refusal stands meanwhile.
        What says nothing about a version is raised, to be tried again later: StoreError, SyncTimeoutError, RolledBack.
        """
        if _other_model(plan, error):
            return False
        began = self._live.position
        with self._status.keeping_refusal():
            self._search(*_narrowed(refused, None if self._leads_on(refused, plan) else plan, error))
        at = self._live.position
        if at is None or at == began:
            return False
        logger.warning("delta sync: serving version %d until version %d or a newer one is healed", at.version, refused)
        return True

    def _search(self, failed: int, target: int) -> None:
        """Nothing from ``failed`` on can be taken: try ``target``, and then what is left between."""
        for _ in range(_TRIES):
            if target <= self._reached:
                return
            plan = None
            try:
                plan = self._plan(target)
                if plan is None or plan.target.version <= self._reached:
                    return
                self._taker.take(plan)
            except DeltaSyncError as error:
                if is_transient(error) or isinstance(error, RolledBack):
                    raise
                logger.info("delta sync: nor can version %d be taken: %s", target, error)
                if plan is not None and self._damaged.blame(plan, error):
                    self._damaged.report(plan, error)  # the same again, from another start
                elif plan is not None:
                    failed, target = _narrowed(target, plan, error)
                else:  # nor does anything lead to what is between this and an anchor that was left out
                    left_out = [ref.version for ref in self._damaged.found if ref.version > self._reached]
                    failed = min([target, *left_out])
                    target = failed - 1
            else:
                target = (self._reached + failed) // 2

    def _leads_on(self, refused: int, plan: Plan | None) -> bool:
        """Whether what is live leads to a version before ``refused``, of which a plan from an anchor says nothing."""
        if plan is None or plan.start != "anchor" or self._live.lost:
            return False
        try:
            return self._plan(refused - 1, without=self._ledger.anchors()) is not None
        except NO_WAY:
            return False

    @property
    def _reached(self) -> int:
        return 0 if self._live.position is None else self._live.position.version

    def _plan(self, version: int, without: Collection[AnchorRef] | None = None) -> Plan | None:
        target, live = self._ledger.newest_below(version + 1), self._live
        if target is None:
            return None
        return self._ledger.plan(
            live.position,
            live.state_digest,
            prefer_anchor=live.lost,
            use_folds=False,
            target=target,
            without=self._damaged.found if without is None else without,
        )


def _other_model(plan: Plan | None, error: DeltaSyncError) -> bool:
    """An error that no version is free of: the model is another than any anchor's, too."""
    whole = getattr(error, "object_key", None) is None or (plan is not None and names_anchor(plan, error))
    return kind_of(error) == "MappingError" and whole


def _narrowed(version: int, plan: Plan | None, error: DeltaSyncError) -> tuple[int, int]:
    """From which version on nothing can be taken, and which to try next, after ``error`` on the way to ``version``.

    Damage that is some object's leaves the version before it. A wrong digest at the end does not say where on the way
    it went wrong: half of it is tried next.
    """
    if plan is None:
        return version, version - 1
    if plan.anchor is not None and is_of_anchor(plan, error):
        return plan.anchor.version, plan.anchor.version - 1
    key = getattr(error, "object_key", None)
    for step in plan.deltas:
        if any(ref.key == key for ref in step.objects):
            return step.version, step.version - 1
    start = plan.deltas[0].base_version or 0 if plan.deltas else version
    return version, min((start + version) // 2, version - 1)
