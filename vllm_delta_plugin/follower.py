"""The coordinator of an engine that takes what another one of its group proposes, and nothing else."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

from delta_sync.errors import ChainError, DeltaSyncError, StoreError, SyncTimeoutError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan
from delta_sync.way_back import plan_back
from vllm_delta_plugin.catch_up import is_of_sums
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.coordinator import Coordinator
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.expert_group import ExpertGroup, Proposal
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.status import Refusal, Status
from vllm_delta_plugin.taker import Taker

_LOOK = 0.02  # seconds between two looks for a proposal
_LONGEST_LOOK = 0.5  # the same between two looks for what it names
_COMES = 10.0  # seconds in which what engine 0 sees in the store must be seen here too: a store's views may lag


@dataclass(frozen=True, eq=False)
class _Waiting:
    order: str
    deadline: float
    future: Future[dict[str, Any]]


class Follower(Coordinator):
    """Audits, waits for clients and reports like any coordinator; engine 0 decides for it what comes next."""

    def __init__(
        self,
        config: ReplicaConfig,
        ledger: Ledger,
        live: Live,
        status: Status,
        stop: threading.Event,
        group: ExpertGroup,
    ) -> None:
        super().__init__(config, ledger, live, status, stop, group)
        self._group, self._taker = group, Taker(live, status, self._report)
        self._audited: str | None = None  # manifest of the version that an audit was made because of
        self._waiting: list[_Waiting] = []
        self._lock = threading.Lock()

    def answer_of_leader(self, order: str, timeout: float) -> Future[dict[str, Any]]:
        """A future answer: what engine 0, which got the same command, made of it; 504 after ``timeout`` seconds."""
        future: Future[dict[str, Any]] = Future()
        with self._lock:
            self._waiting.append(_Waiting(order, time.monotonic() + timeout, future))
        return future

    def turn(self) -> None:
        """See Coordinator.turn."""
        self._hold_as_engine_0()
        self._refuse_as_engine_0()
        self._serve_waiters()
        self._scan()
        self._answer_commands()
        self._stop.wait(_LOOK)
        if self._live.must_audit:
            return
        proposal = self._group.proposed()
        if proposal is not None:
            self._scans.step()  # other engines' news came before what is proposed because of it
            self._refuse_as_engine_0()  # and so did this
            self._take_proposed(proposal)

    def _scan(self) -> None:
        """As any coordinator; one that fails and is due before the next commit is said to those who wait for that."""
        try:
            self._scans.step()
        except DeltaSyncError as error:
            if self._live.must_audit and self._group.proposed() is not None:
                due = "one that succeeds before the next commit"
                self._group.fail(SyncTimeoutError("scan of live memory", expected=due, got=str(error)))
            raise

    def _take_proposed(self, proposal: Proposal) -> None:
        plan = None
        try:
            if proposal.newest is not None:
                self.status.saw(proposal.newest)
            with self._store_clock.asking(f"planning the way to version {proposal.version}"):
                plan = self._way(proposal)
            with self.status.keeping_refusal() if proposal.keeps_refusal else contextlib.nullcontext():
                self._taker.take(plan)
        except RolledBack:
            return  # reported; engine 0 tries again
        except DeltaSyncError as error:
            self._group.fail(error)
            self.status.note_error(error)  # whether that is a refusal engine 0 decides, who may know another way
            if is_of_sums(error) and proposal.manifest != self._audited:
                self._live.request_audit()
                self._audited = proposal.manifest
        except Exception as error:
            self._group.fail(error)
            raise
        else:
            self._tell()

    def _way(self, proposal: Proposal) -> Plan:
        target, listed = self._seen(proposal)
        at = self._live.position
        if proposal.start == "back":
            if at is None:
                raise ChainError("rollback", expected="a version that is served", got="none yet")
            return plan_back(self._ledger, target, at)
        anchor = proposal.start == "anchor"
        others = [each for each in listed if (each.version, each.epoch) != proposal.anchor]
        plan = self._ledger.plan(
            at,
            self._live.state_digest,
            prefer_anchor=anchor,
            use_folds=proposal.folds,
            target=target,
            without=others if anchor else (),
        )
        if plan is None:
            raise ChainError(f"way to version {target.version}", expected="a plan", got="none in an empty run")
        return plan

    def _seen(self, proposal: Proposal) -> tuple[Manifest, list[AnchorRef]]:
        """The proposed version, and all anchors if one is the start; StoreError if what engine 0 saw does not come.

        That is no refusal: it says nothing about the version, and a trainer would answer with complete weights.
        """
        seconds, pause = min(_COMES, proposal.seconds), _LOOK
        deadline = time.monotonic() + seconds
        while True:
            anchors = self._ledger.anchors() if proposal.anchor else []
            try:
                if proposal.anchor and AnchorRef(*proposal.anchor) not in anchors:
                    raise ChainError("anchors", expected=f"that of version {proposal.anchor[0]}", got="others or none")
                return self._ledger.manifest(proposal.version, proposal.manifest), anchors
            except ChainError as error:
                if time.monotonic() > deadline or self._stop.wait(pause):
                    raise StoreError(
                        f"version {proposal.version} as engine 0 proposes it",
                        expected=f"to be seen here within {seconds:g} s",
                        got=str(error),
                        remedy="look at whether all engines see the same store",
                    ) from error
            pause = min(_LONGEST_LOOK, pause * 1.5)

    def _hold_as_engine_0(self) -> None:
        """Whatever became of the order's answer: an order that was too late for it is carried out all the same."""
        if (held := self._group.held()) is not None:
            self.status.update(pinned=held["version"])

    def _refuse_as_engine_0(self) -> None:
        if (told := self._group.refused()) is None:
            return
        if told["refusal"] is None:
            self._report.nothing_refused()
            return
        refusal = Refusal(**told["refusal"])
        error = refusal.error if refusal.error.startswith("engine ") else f"engine 0: {refusal.error}"
        self._report.refuse(replace(refusal, error=error))

    def _answer_commands(self) -> None:
        for waiting in list(self._waiting):
            if (answer := self._group.answer(waiting.order)) is not None:
                self._hold_as_engine_0()  # which was told before the answer
                self._finish(waiting, answer)

    def _expire(self) -> None:
        """See Coordinator; commands too, however long a round takes."""
        super()._expire()
        late = {"ok": False, "code": 504, "error": "no answer from engine 0 was seen here yet: look at its status"}
        for waiting in list(self._waiting):
            if time.monotonic() > waiting.deadline:
                self._finish(waiting, late)

    def _finish(self, waiting: _Waiting, answer: Mapping[str, Any]) -> None:
        """Answer a command, unless another thread has."""
        with self._lock:
            if waiting not in self._waiting:
                return
            self._waiting.remove(waiting)
        waiting.future.set_result({**answer, "status": self.status.to_dict()})
