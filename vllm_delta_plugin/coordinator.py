"""The replica's own thread: watch the store, stage, prove, commit, acknowledge; refuse, heal, audit."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from delta_sync.breath import beside
from delta_sync.errors import DeltaSyncError
from delta_sync.ledger import Ledger
from vllm_delta_plugin.catch_up import CatchUp
from vllm_delta_plugin.config import ReplicaConfig
from vllm_delta_plugin.control import Control
from vllm_delta_plugin.damaged_anchors import NO_WAY, DamagedAnchors
from vllm_delta_plugin.engine_commit import RolledBack
from vllm_delta_plugin.group import ALONE, Group
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Live
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.lookout import BUSY_TURN, Lookout
from vllm_delta_plugin.main_thread import EngineBroken, Stopped
from vllm_delta_plugin.ranks import kind_of
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.scans import Scans
from vllm_delta_plugin.status import Status
from vllm_delta_plugin.store_clock import StoreClock
from vllm_delta_plugin.taker import Taker
from vllm_delta_plugin.waiters import Waiters

_TICK = 0.1  # seconds between two looks at the clients' deadlines


class Coordinator:
    """One per engine; ``start`` runs it in a daemon thread until ``stop`` is called."""

    def __init__(
        self,
        config: ReplicaConfig,
        ledger: Ledger,
        live: Live,
        status: Status,
        stop: threading.Event,
        group: Group = ALONE,
    ) -> None:
        self._ledger, self._live, self.status, self._stop = ledger, live, status, stop
        self._hold, self._store_clock = Hold(config.retry), StoreClock()
        self._report = Reporter(ledger, status, config.acknowledge, live.outputs.gap, self._store_clock, group)
        self._scans = Scans(live, status, self._report, self._hold, stop)
        self._lookout = Lookout(config, ledger, live, status, self._hold, self._store_clock)
        taker = Taker(live, status, self._report)
        damaged = DamagedAnchors(taker, self._report)
        self._control = Control(ledger, live, status, taker, damaged, self._scans.finish_one, group)
        self._catch_up = CatchUp(
            ledger,
            live,
            status,
            self._report,
            taker,
            damaged,
            self._control,
            self._lookout,
            self._hold,
            self._store_clock,
        )
        self._waiters = Waiters()
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
        self._lookout.wake()
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
        self._lookout.wake()
        return future

    def hint(self) -> None:
        """Look at the store at once: somebody says that there is something new."""
        self._lookout.hurry()

    def scan(self) -> Future[dict[str, Any]]:
        """A future ``tensors`` answer made by a full scan of live memory that starts now."""
        return self._scans.ask()

    def tensors(self) -> dict[str, Any]:
        """The proven digests of what is served, as /delta_sync/tensors shows them."""
        return self._scans.tensors()

    def run(self) -> None:
        """Turn after turn until stopped; an error ends a turn, never the thread."""
        with beside(lambda: self._live.outputs.coming):
            self._run()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self.turn()
            except (Stopped, EngineBroken):
                return
            except Exception as error:  # noqa: BLE001  # a bug must show in status, not end the replica
                self._note(error)
                self._hold.start()
                self._stop.wait(_TICK)  # what fails at once would be tried without end

    def turn(self) -> None:
        """One look at everything there is to do; returns within about a second unless a version is taken."""
        self._serve_waiters()
        self._scans.step()
        if self._control and not self._live.must_audit:
            if self._control.obey():
                self._catch_up.arrived()
                self._tell()
            return
        try:
            moved = self._follow()
        except RolledBack:  # reported and counted where it happened; what came before it may have been served
            self._hold.start()
            moved = True
        except DeltaSyncError:
            self._tell()  # likewise, before a search for something older met a store that fails
            raise
        if moved:
            self._tell()

    def _follow(self) -> bool:
        """Look for something newer and try to serve it; whether another version is served now."""
        try:
            newest = self._lookout.look(self._control.target, bool(self._scans or self._waiters))
        except NO_WAY as error:
            return self._catch_up.cannot_read_newest(error)
        if newest is None:
            return False
        if self._live.must_audit:
            self._stop.wait(BUSY_TURN)
            return False
        return self._catch_up.go(newest)

    def _tell(self) -> None:
        """Say what is served: first to those who wait for it, as the acknowledgement may wait for tokens itself."""
        self._serve_waiters()
        self._report.acknowledge()

    def _serve_waiters(self) -> None:
        if not self._waiters:
            return
        self._waiters.resolve(self.status.served.version, self.status.pinned, self.status.to_dict)
        if asking := self._waiters.for_newest():
            try:
                with self._store_clock.asking("looking for the newest version"):
                    newest = self._ledger.head()
            except Exception as error:  # noqa: BLE001  # they go on waiting, and the replica goes on following
                self.status.note_error(error)
            else:
                self._waiters.wait_for(newest.version if newest else 0, asking)

    def _watch(self) -> None:
        """Beside the coordinator's thread, which a store may hold up: deadlines of clients, and a word in status."""
        while not self._stop.wait(_TICK):
            try:
                self._expire()
            except Exception as error:  # noqa: BLE001  # without this thread clients would wait for ever
                self._note(error)

    def _expire(self) -> None:
        self._waiters.expire(self.status.to_dict)
        self._control.expire()
        self._live.gate.expire()
        self._store_clock.complain_if_slow(self.status)

    def _note(self, error: Exception) -> None:
        """In status and counts, with a traceback in the log if it is a bug that was not seen just before."""
        if not isinstance(error, DeltaSyncError) and self._is_news(error):
            logger.exception("delta sync: unexpected error, trying again")
        self.status.note_error(error)
        self.status.measures.failed(kind_of(error))

    def _is_news(self, error: Exception) -> bool:
        return self.status.last_error is None or self.status.last_error["error"] != str(error)
