"""Full scans of live memory, in the background or because somebody asks, and what follows from what they find."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

from delta_sync.errors import DeltaSyncError
from vllm_delta_plugin.holding import Hold
from vllm_delta_plugin.live import Audit, Live
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Status, as_mapping

_POLL = 0.05  # seconds


class Scans:
    """Used from the coordinator's thread, but for ``ask`` and ``tensors``."""

    def __init__(self, live: Live, status: Status, report: Reporter, hold: Hold, stop: threading.Event) -> None:
        self._live, self._status, self._report, self._hold, self._stop = live, status, report, hold, stop
        self._asked: list[Future[dict[str, Any]]] = []
        self._awaited: list[Future[dict[str, Any]]] = []  # asked for before the scan that runs began

    def __bool__(self) -> bool:
        return bool(self._asked or self._awaited) or self._live.auditing

    def ask(self) -> Future[dict[str, Any]]:
        """A future ``tensors`` answer made by a scan that has yet to start, or {"error": why there is none}."""
        future: Future[dict[str, Any]] = Future()
        self._asked.append(future)
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

    def step(self) -> None:
        """Begin a scan that is due, or see to the one that runs; returns at once."""
        asked, was_running = len(self._asked), self._live.auditing
        if asked or self._awaited:
            self._live.request_audit()
        try:
            audit = self._live.audit_step()
        except DeltaSyncError as error:
            self._await(asked)
            self._answer({"error": str(error)})
            raise
        finally:
            self._status.audit.state = "running" if self._live.auditing else "idle"
        if audit is not None:
            self._judge(audit)
        elif self._live.auditing and not was_running:
            self._await(asked)

    def finish_one(self) -> None:
        """Return once a scan that starts now is done, and what it found is known; raises why there is none."""
        future = self.ask()
        while not future.done() and not self._stop.wait(_POLL):
            self.step()

    def _judge(self, audit: Audit) -> None:
        self._status.audit.began_at_last, self._status.audit.ended_at_last = self._live.audited or (None, None)
        self._status.audit.completed += 1
        self._status.measures.audits["ok" if audit.error is None else "failed"] += 1
        if audit.error is None:
            self._status.audit.last_ok_version = self._status.served.version
        else:
            self._live.forget(audit.found, audit.copies_differ)  # from here on only what the scan found counts
            self._report.poisoned(audit.error, self._live.state_digest)
            self._hold.clear()
        self._answer(self.tensors())

    def _await(self, asked: int) -> None:
        """The first so many wait for the scan that runs."""
        self._awaited += self._asked[:asked]
        del self._asked[:asked]  # others may be asking meanwhile

    def _answer(self, answer: dict[str, Any]) -> None:
        awaited, self._awaited = self._awaited, []
        for future in awaited:
            future.set_result(answer)
