"""Keeps looking at a run, and tells whoever waits when there is something new."""

from __future__ import annotations

import json
import threading
import time

from delta_sync.cli.dashboard.heat import HeatMap, sample
from delta_sync.cli.dashboard.summary import WINDOWS, Look, sections
from delta_sync.cli.dashboard.times import CommitTimes
from delta_sync.cli.view import Row, RunView
from delta_sync.errors import ChainError, DeltaSyncError

FIRST, BUDGET = 0.2, 0.5  # seconds of one look that go into older versions, and into the heads of deltas
UNWATCHED = 10.0  # seconds between looks where nobody asked for so long


class LiveRun:
    """One thread that refreshes a view every ``interval`` seconds; pages ask ``sections`` from threads of their own."""

    def __init__(self, view: RunView, interval: float = 1.0) -> None:
        self._view, self._interval = view, interval
        self._heat, self._times = HeatMap(view.ledger.store, view.ledger.limits), CommitTimes()
        self._look = Look(view.ledger.store.uri)
        self._revision = 0
        self._texts: dict[str, tuple[int, dict[str, str]]] = {}  # by window: of which revision, and the parts
        self._windows = {"all"}  # that a page asked for
        self._pages = 0
        self._asked = time.monotonic()
        self._changed = threading.Condition()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-sync-look", daemon=True)

    def __enter__(self) -> LiveRun:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._wake.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(10)

    @property
    def stopped(self) -> bool:
        """Whether no more looks are taken."""
        return self._stop.is_set()

    def open_page(self, most: int) -> bool:
        """Count one more page that listens; False if there are ``most`` already."""
        with self._changed:
            if self._pages >= most:
                return False
            self._pages += 1
        self._wake.set()
        return True

    def close_page(self) -> None:
        """Count one less."""
        with self._changed:
            self._pages -= 1

    def sections(self, window: str, newer_than: int = 0, seconds: float = 0.0) -> tuple[int, dict[str, str]]:
        """The revision and the page's parts as JSON, once they are newer or ``seconds`` have passed."""
        if window not in self._windows or time.monotonic() - self._asked > self._interval:
            self._windows.add(window)
            self._wake.set()
        self._asked = time.monotonic()
        with self._changed:
            self._changed.wait_for(lambda: self._revision > newer_than or self.stopped, seconds)
            revision, look = self._revision, self._look
            made, texts = self._texts.get(window, (-1, {}))
            if made != revision:
                found = sections(look, window, self._heat, self._times)
                texts = {name: json.dumps(part, separators=(",", ":")) for name, part in found.items()}
                self._texts[window] = revision, texts
        return revision, texts

    def _run(self) -> None:
        budget = FIRST
        while not self._stop.is_set():
            began = time.monotonic()
            try:
                busy = self._look_once(budget)
            except Exception as error:  # noqa: BLE001 - a page must not stand still without a word
                busy = False
                self._publish(DeltaSyncError(f"look at {self._look.uri}", expected="rows", got=repr(error)))
            budget = BUDGET
            idle = not self._pages and time.monotonic() - self._asked > UNWATCHED
            interval = UNWATCHED if idle else self._interval
            # A slow store is not asked all the time.
            self._wake.wait(0.01 if busy else max(interval, 2 * (time.monotonic() - began)))
            self._wake.clear()

    def _look_once(self, budget: float) -> bool:
        """Whether there is more to read at once."""
        view, failed = self._view, None
        try:
            view.refresh(budget)
        except DeltaSyncError as error:
            failed = error
        self._times.take(view.replicas)
        self._publish(failed)  # before heads are read: the first paint should not wait for them
        # A page may ask for one more window meanwhile.
        wanted = {row["manifest"]: row for window in tuple(self._windows) for row in self._columns(window)}
        newest_first = sorted(wanted.values(), key=lambda row: row["version"], reverse=True)
        read, missing = self._heat.fill([(row, view.objects(row)) for row in newest_first], budget)
        if read:
            self._heat.forget_but(wanted)
            self._publish(failed, heads_were_read=True)
        return missing or not (view.complete or failed)

    def _columns(self, window: str) -> list[Row]:
        last = WINDOWS[window]
        return sample(self._view.versions if last is None else self._view.versions[-last:])

    def _publish(self, failed: DeltaSyncError | None, *, heads_were_read: bool = False) -> None:
        view, end = self._view, self._view.chain_end
        gone = isinstance(end, ChainError)  # deleted, as old versions are: nobody has to do anything
        problems = tuple(str(error) for error in (failed, view.damaged_newest, None if gone else end) if error)
        look = Look(
            self._look.uri,
            view.run,
            tuple(view.versions),
            tuple(view.replicas),
            view.complete,
            True,
            problems,
            str(end) if end and gone else None,
        )
        with self._changed:
            if heads_were_read or look != self._look:
                self._look, self._revision = look, self._revision + 1
                self._changed.notify_all()
