"""Full scans of live memory, in the background or because somebody asks, and what follows from what they find."""

from __future__ import annotations

import threading
from concurrent.futures import Future
from typing import Any

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

    def __bool__(self) -> bool:
        return bool(self._asked) or self._live.auditing

    def ask(self) -> Future[dict[str, Any]]:
        """A future ``tensors`` answer made by a scan that starts now."""
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
        if self._asked:
            self._live.request_audit()
        audit = self._live.audit_step()
        self._status.audit.state = "running" if self._live.auditing else "idle"
        if audit is not None:
            self._judge(audit)

    def finish_one(self) -> None:
        """Return once a scan of live memory is done, and what it found is known."""
        before = self._status.audit.completed
        self._live.request_audit()
        while self._status.audit.completed == before and not self._stop.wait(_POLL):
            self._live.request_audit()
            self.step()

    def _judge(self, audit: Audit) -> None:
        self._status.audit.completed += 1
        self._status.measures.audits["ok" if audit.error is None else "failed"] += 1
        if audit.error is None:
            self._status.audit.last_ok_version = self._status.served.version
        else:
            self._live.forget(audit.found)  # from here on only what the scan found counts
            self._report.poisoned(audit.error, self._live.state_digest)
            self._hold.clear()
        answer, asked, self._asked = self.tensors(), self._asked, []
        for future in asked:
            future.set_result(answer)
