"""The replica's own thread: watch the store, stage, prove, commit, acknowledge; refuse, heal, audit."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Hashable, Iterator
from concurrent.futures import Future
from typing import Any

from delta_sync.errors import ChainError, DeltaSyncError, FormatError, IntegrityError, MappingError, StoreError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.plan import Plan, Position
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.control import Control
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.fallback import Fallback
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.main_thread import EngineBroken, Stopped
from vllm_delta_plugin.ranks import RankError, is_transient
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Status, as_mapping
from vllm_delta_plugin.taker import Taker
from vllm_delta_plugin.waiters import Waiters

_GONE = "NotFoundError"  # a rank's error: an object of the plan was deleted, by retention or by accident
_RE_ANCHORS = 2  # tries in turn to get past deleted objects before one is refused as lost
_NO_WAY = (ChainError, FormatError, IntegrityError)  # what a plan fails with until somebody repairs the run
_TURN = 1.0  # seconds one look at the store may take before other duties get their turn
_ANCHOR_COMES = 1.0  # seconds in which the anchor of a new epoch's origin may follow it
_TICK = 0.1  # seconds between two looks at the clients' deadlines
_SLOW_STORE = 30.0  # seconds without an answer after which status says so
_BUSY_TURN = 0.05  # the same while a scan runs or a client waits


class Coordinator:
    """One per engine; ``start`` runs it in a daemon thread until ``stop`` is called."""

    def __init__(self, config: ReplicaConfig, ledger: Ledger, live: Live, status: Status, stop: threading.Event):
        self._config, self._ledger, self._live, self.status = config, ledger, live, status
        self._stop = stop
        self._report = Reporter(ledger, status, config.acknowledge, live.outputs.gap)
        self._taker = Taker(live, status, self._report)
        self._control = Control(ledger, live, status, self._taker, self._scan_now)
        self._fallback = Fallback(ledger, live, status, self._taker)
        self._searched: Hashable = None  # what the store looked like, and where that led: not searched again
        self._hold = Hold(config.retry)
        self._wake = threading.Event()  # ends a pause of the thread early
        self._waiters = Waiters()
        self._scans: list[Future[dict[str, Any]]] = []
        self._newest: Manifest | None = None
        self._tried_anchor = False
        self._gone = 0  # plans in turn whose objects were deleted
        self._orphan = "", 0.0  # an origin that nothing leads to, and since when
        self._asking_since: float | None = None
        self._thread = threading.Thread(target=self.run, name="delta-sync", daemon=True)
        self._clock = threading.Thread(target=self._watch, name="delta-sync-clock", daemon=True)

    def start(self) -> None:
        """Begin to follow the run."""
        self._ledger.store.follow()
        self._thread.start()
        self._clock.start()

    def stop(self, timeout: float = 5.0) -> None:
        """End the thread; a read from the store that takes longer than ``timeout`` seconds is left behind."""
        self._stop.set()
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(timeout)

    def wait_for(self, version: int | None, timeout: float) -> Future[dict[str, Any]]:
        """A future status, done when ``version`` (default: the newest now) is served or time is over."""
        return self._waiters.add(version, timeout)

    def command(
        self, action: str, version: int | None, timeout: float, dry_run: bool = False
    ) -> Future[dict[str, Any]]:
        """A future answer to what an operator asks; see Control.submit."""
        future = self._control.submit(action, version, timeout, dry_run=dry_run)
        self._wake.set()
        return future

    def hint(self) -> None:
        """Look at the store at once: somebody says that there is something new."""
        self._hold.hurry()
        self._wake.set()

    def scan(self) -> Future[dict[str, Any]]:
        """A future ``tensors`` answer made by a full scan of live memory that starts now."""
        future: Future[dict[str, Any]] = Future()
        self._scans.append(future)
        return future

    def tensors(self) -> dict[str, Any]:
        """The proven digests of what is served, as /delta_sync/tensors shows them."""
        position = self._live.position
        return {
            "version": position.version if position else None,
            "state_digest": self._live.state_digest or "",
            "tensors": as_mapping(self._live.states()),
            "adapter": as_mapping(self._live.adapter_states),
        }

    def run(self) -> None:
        """Turn after turn until stopped; an error ends a turn, never the thread."""
        while not self._stop.is_set():
            try:
                self.turn()
            except (Stopped, EngineBroken):
                return
            except Exception as error:  # noqa: BLE001  # a bug must show in status, not end the replica
                if not isinstance(error, DeltaSyncError) and self._is_news(error):
                    logger.exception("delta sync: unexpected error, trying again")
                self.status.note_error(error)
                self.status.measures.failed(type(error).__name__)
                self._hold.start()

    def _watch(self) -> None:
        """Beside the coordinator's thread, which a store may hold up: deadlines of clients, and a word in status."""
        while not self._stop.wait(_TICK):
            self._waiters.expire(self.status.to_dict)
            self._control.expire()
            self._live.gate.expire()
            since = self._asking_since
            if since is not None and time.monotonic() - since > _SLOW_STORE:
                error = StoreError(
                    "looking for a newer version",
                    expected=f"the store's answer within {_SLOW_STORE:g} s",
                    got="none yet",
                    remedy="look at that file system or store; the old version is served meanwhile",
                )
                self.status.note_error(error)

    @contextlib.contextmanager
    def _asking(self) -> Iterator[None]:
        self._asking_since = time.monotonic()
        try:
            yield
        finally:
            self._asking_since = None

    def turn(self) -> None:
        """One look at everything there is to do; returns within about a second unless a version is taken."""
        self._serve_waiters()
        self._audit()
        if self._control and not self._live.must_audit:
            if self._control.obey():
                self._arrived()
            return
        try:
            with self._asking():
                newest = self._look()
        except _NO_WAY as error:
            self._cannot_read_newest(error)
            return
        if newest is None:
            return
        if self._live.must_audit:
            self._stop.wait(_BUSY_TURN)
            return
        with self._asking():
            plan = self._plan()
        if plan is not None:
            self._take(plan)

    # -- watching ------------------------------------------------------------------------------

    def _look(self) -> Manifest | None:
        """The newest version if there is something to do about it."""
        busy = self._live.auditing or self._scans or self._waiters
        seconds = _BUSY_TURN if busy else _TURN
        pinned = self._control.target
        if self._hold.active or pinned is not None:
            self._wake.wait(min(seconds, self._config.poll))
            newest = self._ledger.head()
        else:
            newest = self._ledger.wait_newer(
                self._live.position, time.monotonic() + seconds, self._wake, poll_seconds=self._config.poll
            )
        self._wake.clear()
        self.status.update(looked_at=time.time())
        if newest is None:
            return None
        self._newest = newest
        self.status.saw(newest.version, newest.created_at)
        if self._hold.active and not self._hold.over(self._signal(newest.sha256)):
            return None
        return None if self._is_at(pinned) else newest

    def _is_at(self, pinned: Manifest | None) -> bool:
        at = self._live.position
        return pinned is not None and at is not None and at.manifest == pinned.sha256

    def _cannot_read_newest(self, error: DeltaSyncError) -> None:
        """The newest version's manifest, or what HEAD says of it, is damaged: a refusal, so that it is healed."""
        top, live = self._ledger.highest_listed(), self._live.position
        if top is None or (live is not None and top.manifest == live.manifest):
            raise error
        self.status.saw(top.version)
        self._report.unreadable(top, error)
        if self._hold.over():
            self._fall_back(top, None, error)

    def _signal(self, manifest: str) -> Hashable:
        """What a publisher's remedy would change: a newer version or another anchor."""
        return manifest, tuple((a.version, a.epoch) for a in self._ledger.anchors())

    def _plan(self) -> Plan | None:
        position = self._live.position
        anchor = self._should_take_anchor(position)
        try:
            plan = self._ledger.plan(
                position,
                self._live.state_digest,
                prefer_anchor=anchor,
                use_folds=self.status.refusal is None,
                target=self._control.target,
                newest=self._newest,
            )
        except _NO_WAY as error:
            self._tried_anchor = anchor
            if self._newest is None:
                raise
            newest = Position(self._newest.version, self._newest.sha256)
            if self._anchor_may_come(self._newest, error):
                self._hold.start(self._signal(newest.manifest))
            else:
                self._report.no_way(self._newest, error)
                self._fall_back(newest, None, error)
            return None
        self._tried_anchor = plan is not None and plan.start == "anchor"
        if plan is None:
            self._hold.clear()
        return plan

    def _anchor_may_come(self, newest: Manifest, error: DeltaSyncError) -> bool:
        """A new epoch's origin is visible before its anchor: for a moment that is nothing to complain of."""
        if newest.kind != "origin" or not isinstance(error, ChainError):
            return False
        if self._orphan[0] != newest.sha256:
            self._orphan = newest.sha256, time.monotonic()
        return time.monotonic() - self._orphan[1] < _ANCHOR_COMES

    def _should_take_anchor(self, position: Position | None) -> bool:
        """After a refusal, an anchor past the live version is tried in turn with the chain."""
        if self._live.lost or 0 < self._gone <= _RE_ANCHORS:
            return True
        if self.status.refusal is None or self._tried_anchor:
            return False
        return self._anchor_past(position)

    def _anchor_past(self, position: Position | None) -> bool:
        reached = -1 if position is None else position.version
        return any(anchor.version > reached for anchor in self._ledger.anchors())

    # -- taking a version ----------------------------------------------------------------------

    def _take(self, plan: Plan) -> None:
        try:
            self._taker.take(plan)
        except RolledBack:
            self._hold.start()
        except RankError as error:
            if is_transient(error):
                raise
            if error.kind == _GONE and not self._live.lost and self._passed_by():
                self._report.passed_by(plan, error)
            else:
                self._refuse(plan, error)
        except (IntegrityError, MappingError) as error:
            self._refuse(plan, error)
        else:
            self._arrived()

    def _passed_by(self) -> bool:
        """Whether an anchor leads past an object that was deleted: then nothing is refused, and the anchor is next."""
        self._gone += 1
        return self._gone <= _RE_ANCHORS and self._anchor_past(self._live.position)

    def _arrived(self) -> None:
        self._hold.clear()
        self._tried_anchor, self._gone = False, 0
        self._serve_waiters()
        self._report.acknowledge()  # after those who wait for the version: it may wait for tokens itself

    def _refuse(self, plan: Plan, error: DeltaSyncError) -> None:
        self._report.refused(plan, error)
        self._fall_back(plan.position, plan, error)

    def _fall_back(self, refused: Position, plan: Plan | None, error: DeltaSyncError) -> None:
        """Wait for a remedy, serving the newest version before the refused one that can be proven."""
        signal = self._signal(refused.manifest)
        if self._control.target is None and (signal, self._live.position) != self._searched:
            if self._fallback.take(refused.version, plan, error):
                self._serve_waiters()
                self._report.acknowledge()
            self._searched = signal, self._live.position
        self._hold.start(signal)

    # -- auditing ------------------------------------------------------------------------------

    def _audit(self) -> None:
        if self._scans:
            self._live.request_audit()
        audit = self._live.audit_step()
        self.status.audit.state = "running" if self._live.auditing else "idle"
        if audit is None:
            return
        self.status.audit.completed += 1
        self.status.measures.audits["ok" if audit.error is None else "failed"] += 1
        if audit.error is None:
            self.status.audit.last_ok_version = self.status.served.version
        else:
            self._live.forget(audit.found)  # from here on only what the scan found counts
            self._report.poisoned(audit.error, self._live.state_digest)
            self._hold.clear()
        answer, scans, self._scans = self.tensors(), self._scans, []
        for future in scans:
            future.set_result(answer)

    def _scan_now(self) -> None:
        """Return once a scan of live memory is done, and what it found is known."""
        before = self.status.audit.completed
        self._live.request_audit()
        while self.status.audit.completed == before and not self._stop.wait(_TICK / 2):
            self._live.request_audit()
            self._audit()

    def _serve_waiters(self) -> None:
        if not self._waiters:
            return
        self._waiters.resolve(self.status.served.version, self.status.to_dict)
        if self._waiters.needs_newest():
            newest = self._ledger.head()
            self._waiters.set_newest(newest.version if newest else 0)

    def _is_news(self, error: Exception) -> bool:
        return self.status.last_error is None or self.status.last_error["error"] != str(error)
