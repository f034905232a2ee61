"""What an operator asks of a replica: hold a version, go back to an older one, follow again, take everything anew."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from delta_sync.errors import ChainError, DeltaSyncError
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan, Position
from delta_sync.way_back import plan_back
from vllm_delta_plugin.damaged_anchors import NO_WAY, DamagedAnchors
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.group import ALONE, Group
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.ranks import RankError, is_transient
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.taker import Taker


@dataclass
class _Command:
    action: str
    version: int | None
    dry_run: bool
    deadline: float
    future: Future[dict[str, Any]]


class Control:
    """Commands come from the engine's thread and are obeyed by the coordinator's, between two looks at the store.

    Only a rollback ever takes a replica to a lower version, and it holds it there. Nothing outlives the engine.
    """

    def __init__(
        self,
        ledger: Ledger,
        live: Live,
        status: Status,
        taker: Taker,
        damaged: DamagedAnchors,
        scan: Callable[[], None],
        group: Group = ALONE,
    ) -> None:
        self._ledger, self._live, self._status, self._scan = ledger, live, status, scan
        self._taker, self._damaged, self._group = taker, damaged, group
        self._queue: deque[_Command] = deque()
        self._lock = threading.Lock()
        self.target: Manifest | None = None  # the version to hold; None: whatever is newest

    def __bool__(self) -> bool:
        return bool(self._queue)

    def submit(
        self, action: str, version: int | None, timeout: float, *, dry_run: bool = False
    ) -> Future[dict[str, Any]]:
        """A future answer: {ok, code, error, status}; after ``timeout`` seconds it says that it is still going on.

        ``dry_run``: what the run's records say against it is found out, and nothing is changed.
        """
        command = _Command(action, version, dry_run, time.monotonic() + timeout, Future())
        with self._lock:
            self._queue.append(command)
        return command.future

    def expire(self) -> None:
        """Answer those whose time is over; what has begun goes on."""
        now = time.monotonic()
        with self._lock:
            for command in self._queue:
                if now >= command.deadline and not command.future.done():
                    command.future.set_result(self._answer(504, "still going on: look at the status"))

    def obey(self) -> bool:
        """Do the oldest command, whether or not somebody still waits for its answer; False if it was a dry run."""
        command = self._queue[0]
        answer = self._answer(500, "an unexpected error: look at the log")
        try:
            self._do(command)
            answer = self._answer(200)
        except DeltaSyncError as error:
            answer = self._answer(503 if is_transient(error) else 409, str(error))
        finally:
            with self._lock:
                self._queue.popleft()
                if not command.future.done():
                    command.future.set_result(answer)
        if not command.dry_run:
            logger.info("delta sync: %s %s: %s", command.action, command.version or "", answer["error"] or "done")
        return not command.dry_run

    def _do(self, command: _Command) -> None:
        if command.dry_run:
            self._check(command.action, command.version)
        elif command.action == "unpin":
            self._hold(None)
        elif command.action == "reload":
            self._reload()
        else:
            self._go(command.action, command.version)

    def _check(self, action: str, version: int | None) -> None:
        """Raise what the command would raise before it fetches anything."""
        if action == "reload":
            self._way(self._reloaded(), None, anchor=True)
        elif action != "unpin":
            target, at = self._aim(action, version)
            if target.version > at.version:
                self._way(target, at)
            elif target.sha256 != at.manifest:
                try:
                    plan_back(self._ledger, target, at)
                except NO_WAY:
                    self._way(target, None)

    def _aim(self, action: str, version: int | None) -> tuple[Manifest, Position]:
        """The version to hold, and what is served; ChainError if it lies in the other direction."""
        at = self._live.position
        if at is None:
            raise ChainError(action, expected="a version that is served", got="none yet")
        target = self._ledger.manifest(at.version, at.manifest) if version is None else self._ledger.manifest(version)
        if action == "rollback" and target.version > at.version:
            raise ChainError(action, expected=f"version {at.version} or an older one", got=version, remedy="use pin")
        if action == "pin" and target.version < at.version:
            raise ChainError(
                action, expected=f"version {at.version} or a newer one", got=version, remedy="use rollback"
            )
        return target, at

    def _go(self, action: str, version: int | None) -> None:
        target, at = self._aim(action, version)
        if target.version > at.version:
            self._take(target, at)
        elif target.sha256 != at.manifest:
            self._go_back(target, at)
        self._hold(target)

    def _go_back(self, target: Manifest, at: Position) -> None:
        """By undoing the deltas in between, else by an anchor."""
        try:
            self._taker.take(plan_back(self._ledger, target, at))
        except (*NO_WAY, RankError) as error:
            if is_transient(error) or isinstance(error, RolledBack):
                raise
            logger.info(
                "delta sync: deltas do not lead back to version %d (%s): looking for an anchor", target.version, error
            )
            self._take(target, None)

    def _take(self, target: Manifest, at: Position | None, *, anchor: bool = False) -> None:
        self._damaged.forget()
        failed = self._damaged.take(lambda without: self._way(target, at, anchor=anchor, without=without))
        if failed is not None:
            raise failed.error if failed.other is None else ChainError(failed.text)

    def _way(
        self,
        target: Manifest,
        at: Position | None,
        *,
        anchor: bool = False,
        without: frozenset[AnchorRef] = frozenset(),
    ) -> Plan:
        state = self._live.state_digest
        plan = self._ledger.plan(at, state, prefer_anchor=anchor, target=target, without=without)
        if plan is None:
            raise ChainError(f"way to version {target.version}", expected="a plan", got="none in an empty run")
        return plan

    def _reload(self) -> None:
        """Read all live memory, then compare it with the newest anchor and its chain and take what differs."""
        self._scan()
        self._take(self._reloaded(), None, anchor=True)

    def _reloaded(self) -> Manifest:
        target = self.target or self._ledger.head()
        if target is None:
            raise ChainError("reload", expected="a version", got="an empty run")
        return target

    def _hold(self, target: Manifest | None) -> None:
        self.target = target
        pinned = None if target is None else target.version
        self._status.update(pinned=pinned)
        self._group.hold(pinned)

    def _answer(self, code: int, error: str | None = None) -> dict[str, Any]:
        return {"ok": code == 200, "code": code, "error": error, "status": self._status.to_dict()}
