"""The coordinator of an engine that takes what another one of its group proposes, and nothing else."""

from __future__ import annotations

import contextlib
import threading
from collections import Counter
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from delta_sync.errors import ChainError, ConflictError, DeltaSyncError
from delta_sync.ledger import Ledger
from delta_sync.plan import Plan
from delta_sync.way_back import plan_back
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.coordinator import Coordinator
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.expert_group import ExpertGroup, Proposal, command_name
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.ranks import is_transient
from vllm_delta_plugin.status import Status

_LOOK = 0.02  # seconds between two looks for a proposal


@dataclass(frozen=True)
class _Waiting:
    name: str
    number: int
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
        super().__init__(config, ledger, live, status, stop)
        self._group = group
        self._commands: Counter[str] = Counter()
        self._waiting: list[_Waiting] = []

    def command(
        self, action: str, version: int | None, timeout: float, dry_run: bool = False
    ) -> Future[dict[str, Any]]:
        """A future answer: what engine 0, which got the same command, made of it."""
        name = command_name(action, version, dry_run)
        self._commands[name] += 1
        future: Future[dict[str, Any]] = Future()
        self._waiting.append(_Waiting(name, self._commands[name], future))
        return future

    def turn(self) -> None:
        """See Coordinator.turn."""
        self._serve_waiters()
        self._audit()
        self._answer_commands()
        self._wake.wait(_LOOK)
        self._wake.clear()
        if self._live.must_audit:
            return
        proposal = self._group.proposed()
        if proposal is not None:
            self._audit()  # other engines' news came before what is proposed because of it
            self._follow(proposal)

    def _follow(self, proposal: Proposal) -> None:
        plan = None
        try:
            self.status.saw(proposal.version)
            plan = self._way(proposal)
            with self.status.keeping_refusal() if proposal.keeps_refusal else contextlib.nullcontext():
                self._taker.take(plan)
        except RolledBack:
            return  # reported; engine 0 tries again
        except DeltaSyncError as error:
            self._group.fail(error)
            if plan is None or is_transient(error) or isinstance(error, ConflictError):
                self.status.note_error(error)
            else:
                self._report.refused(plan, error)
        except Exception as error:
            self._group.fail(error)
            raise
        else:
            self._serve_waiters()
            self._report.acknowledge()

    def _way(self, proposal: Proposal) -> Plan:
        target, at = self._ledger.manifest(proposal.version, proposal.manifest), self._live.position
        if proposal.start == "back":
            if at is None:
                raise ChainError("rollback", expected="a version that is served", got="none yet")
            return plan_back(self._ledger, target, at)
        anchor = proposal.start == "anchor"
        digest = self._live.state_digest
        plan = self._ledger.plan(at, digest, prefer_anchor=anchor, use_folds=proposal.folds, target=target)
        if plan is None:
            raise ChainError(f"way to version {target.version}", expected="a plan", got="none in an empty run")
        return plan

    def _answer_commands(self) -> None:
        for waiting in list(self._waiting):
            answer = self._group.answer(waiting.name, waiting.number)
            if answer is not None:
                self._waiting.remove(waiting)
                if answer["ok"]:
                    self.status.update(pinned=answer["pinned"])
                waiting.future.set_result({**answer, "status": self.status.to_dict()})
