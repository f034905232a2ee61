"""One background thread that encodes, uploads and commits what the training thread captured."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from delta_sync import tracing
from delta_sync.at_exit import at_exit, not_at_exit
from delta_sync.errors import DeltaSyncError, ResetError, StoreError, SyncTimeoutError
from trl_callback.chain import Attempt, Chain, Published
from trl_callback.changes import ChangeSet, rebase
from trl_callback.config import DeltaSyncConfig
from trl_callback.healing import Healer, Refusal
from trl_callback.metrics import Metrics
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot

logger = logging.getLogger(__name__)

FIRST_RETRY, LAST_RETRY = 0.2, 10.0  # seconds between tries at a failing store
LOOK = 5.0  # seconds between looks at the bucket's acknowledgements while there is nothing to publish
_SLOWEST = 1e6  # bytes a second; a store that is slower with complete weights counts as one that hangs
RETRY_ANCHOR = 50  # versions until an anchor that failed is due again, without ``anchor_every``
STOP = 5.0  # seconds the interpreter's exit waits for the thread
LAST_CALL = 60.0  # seconds it waits before for what was trained last, when training ended by an exception or Ctrl-C

Job = Callable[[], None]


class Publisher:
    """Owns the chain and moves the snapshot; the training thread only captures, waits and reads.

    At most one change set waits. It is always relative to the snapshot: a newer capture replaces it, and when the
    one before it becomes durable the snapshot moves and the waiting one is rebased, under one lock. A commit that
    fails is tried again with the same content, so that an ambiguous answer can't fork the chain.
    """

    def __init__(
        self,
        chain: Chain,
        snapshot: Snapshot,
        config: DeltaSyncConfig,
        metrics: Metrics,
    ) -> None:
        self._chain, self._snapshot, self._config, self._metrics = chain, snapshot, config, metrics
        self._healer = Healer(grace=config.refusal_grace)
        self._old_refusals = {r for r in chain.acknowledged().values() if r is not None}
        self._changed = threading.Condition()  # guards everything below, and the snapshot against diff while it moves
        self._waiting: ChangeSet | None = None
        self._in_flight: ChangeSet | None = None
        self._attempt: Attempt | None = None  # of what is in flight; the thread's own
        self._refusals: dict[str, Refusal] = {}
        self.anchor_wanted = self._anchor_urgent = False
        self._must_begin_again = False
        self._aside_is_next = True  # versions and what else there is to do take turns
        self.trim_due = False
        self._anchor_failed_at: int | None = None  # the newest version then
        self._stopping = False
        self._failure: BaseException | None = None
        self._failing_since: float | None = None
        self._job_ends: float | None = None  # when the job in hand has taken so long that its store call must hang
        self.last_error: DeltaSyncError | None = None
        self.captured_step = chain.newest.step
        self._thread = threading.Thread(target=self._run, name="delta-sync-publisher", daemon=True)

    # The training thread's side.

    def start(self) -> None:
        """Start the thread; it ends with ``stop``, or with the interpreter, once what was captured is durable."""
        at_exit(self.leave)
        self._thread.start()

    def capture(
        self, image: ServingImage, step: int, *, even_if_same: bool = True, trace: tracing.Span = tracing.OFF
    ) -> ChangeSet:
        """Compare the model with the snapshot and leave the changes, possibly none, for the thread to publish.

        Where no version is on its way, encoding and uploading begin while tensors are still compared.
        """
        began = time.time()
        with self._changed:
            self.raise_if_failed()
            parts = self._chain.begin_early() if self.is_idle else None
            try:
                deltas = self._snapshot.diff(image, None if parts is None else parts.add)
            except BaseException:
                if parts is not None:
                    parts.abandon()
                raise
            changes = ChangeSet(step, deltas, parts, trace)
            trace.child("delta_sync.publish.detect", began, time.time(), changed_elements=changes.changed)
            self.submit(changes, even_if_same=even_if_same)
            return changes

    def submit(self, changes: ChangeSet, *, even_if_same: bool = True) -> None:
        """Leave changes to the snapshot for the thread to publish."""
        with self._changed:
            if changes.changed or even_if_same or self._in_flight is not None:
                self._waiting = _in_place_of(self._waiting, changes)
                self._changed.notify_all()
            else:
                changes.trace.end()
            self.captured_step = max(self.captured_step, changes.step)

    @property
    def is_idle(self) -> bool:
        """Whether everything captured is durable."""
        with self._changed:
            return self._waiting is None and self._in_flight is None

    def want_anchor(self, *, urgent: bool) -> None:
        """Have complete weights attached to the newest version: before the next delta if urgent, else in between."""
        with self._changed:
            self.anchor_wanted, self._anchor_urgent = True, self._anchor_urgent or urgent
            self._changed.notify_all()

    def report(self, replicas: Mapping[str, Refusal | None]) -> None:
        """Say what replicas refuse, or None for nothing; the thread answers with the remedy that is due."""
        with self._changed:
            for replica, refusal in replicas.items():
                if refusal is not None:
                    self._refusals[replica] = refusal
                    self._changed.notify_all()
                else:
                    self._refusals.pop(replica, None)
                    self._healer.recovered(replica)

    def covering(self, step: int) -> Published | None:
        """The first durable version that covers ``step``, None while there is none."""
        with self._changed:
            return self._chain.covering(step)

    def by_version(self, version: int) -> Published | None:
        """This trainer's durable ``version``, None if it has none of that number."""
        with self._changed:
            return self._chain.by_version(version)

    def wait_covering(self, step: int, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for a durable version that covers ``step``."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure or self._chain.covering(step), timeout)

    @property
    def epoch(self) -> int:
        """The epoch this trainer publishes in."""
        return self._chain.epoch

    def raise_if_failed(self) -> None:
        """Raise what stopped the thread, in the caller's thread; StoreError if a store call doesn't return."""
        if self._failure is not None:
            raise self._failure
        ends = self._job_ends
        if ends is not None and time.monotonic() > ends:
            raise StoreError(
                f"writing to {self._config.shown_uri}",
                expected=f"an end within publish_timeout ({self._config.publish_timeout:g} s, and 1 s a megabyte)",
                got="a call that has not returned",
                remedy="look at that file system or store; a new run on this URI continues from what is durable",
            )

    def flush(self, timeout: float) -> None:
        """Wait until everything captured is durable; SyncTimeoutError after ``timeout`` seconds."""
        with self._changed:
            done = self._changed.wait_for(lambda: self._failure or not (self._waiting or self._in_flight), timeout)
        self.raise_if_failed()
        if not done:
            raise SyncTimeoutError(
                f"publishing step {self.captured_step} to {self._config.shown_uri}",
                expected=f"durable within {timeout:g} s",
                got=str(self.last_error or "an upload still running"),
                remedy="check the store, or raise flush_timeout; a new run on this URI continues from what is durable",
            )

    def stop(self, timeout: float = STOP) -> bool:
        """End the thread after the job it is in, and say whether it has; what is not durable by then is given up."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(timeout)
        not_at_exit(self.leave)
        return not self._thread.is_alive()

    def leave(self) -> None:
        """End the thread as soon as all that was captured is durable, or after ``LAST_CALL`` seconds."""
        if not self.is_idle and self._failure is None:
            logger.warning("delta-sync: publishing step %d before the exit (Ctrl-C: exit now)", self.captured_step)
            with self._changed:
                self._changed.wait_for(lambda: self._failure or not (self._waiting or self._in_flight), LAST_CALL)
        if not self.is_idle:
            said = self._failure or self.last_error or "an upload still running"
            logger.error("delta-sync: step %d is not in the bucket: %s", self.captured_step, said)
        self.stop()

    # The thread's side.

    def _run(self) -> None:
        try:
            while (job := self._next_job()) is not None:
                self._try(job)
            self._chain.abandon_anchor()
        except BaseException as error:  # noqa: BLE001 (the training thread raises it)
            with self._changed:
                self._failure = error
                self._changed.notify_all()

    def _next_job(self) -> Job | None:
        with self._changed:
            while not self._stopping:
                job = self._due_job()
                if job is not None:
                    return job
                if not self._changed.wait(LOOK):
                    return self._idle
            return None

    def _due_job(self) -> Job | None:
        if self._must_begin_again:
            return self._begin_again
        if self._refusals:
            return self._heal
        if self.anchor_wanted and self._anchor_urgent:
            return self._anchor_now
        to_publish = self._waiting or self._in_flight
        aside = self._next_shard if self.anchor_wanted else self._trim if self.trim_due else None
        if aside and (self._aside_is_next or not to_publish or self._chain.anchor_must_go_on):
            return aside
        return self._publish if to_publish else None

    def _try(self, job: Job) -> None:
        """Run one job; a failing store is retried, ever more slowly, until ``publish_timeout``."""
        self._allow(self._snapshot.total_bytes)
        try:
            job()
        except StoreError as error:
            self._job_ends = None
            self._pause_after(error)
        except ResetError as error:
            self._must_begin_again = True
            logger.warning("delta-sync: %s", error)
        else:
            self._failing_since = self.last_error = None
        finally:
            self._job_ends = None

    def _allow(self, size: int) -> None:
        """Give the job in hand the time that ``size`` bytes take, from now."""
        self._job_ends = time.monotonic() + self._config.publish_timeout + size / _SLOWEST

    def _pause_after(self, error: StoreError) -> None:
        now = time.monotonic()
        self._failing_since = self._failing_since or now
        failing = now - self._failing_since
        self._note_failure(error)
        if failing >= self._config.publish_timeout:
            raise error
        pause = min(LAST_RETRY, FIRST_RETRY + failing) * random.uniform(0.5, 1.0)
        with self._changed:
            self._changed.wait_for(lambda: self._stopping, pause)

    def _note_failure(self, error: StoreError) -> None:
        self.last_error = error
        self._metrics.record(store_failures=1)
        logger.warning("delta-sync: %s; trying again", error)

    def _begin_again(self) -> None:
        """An operator had the chain forgotten: an origin, complete weights, then what was about to be published."""
        self._chain.begin_again()
        with self._changed:
            self._attempt, self._must_begin_again = None, False  # it was coded for a version that is the origin's now
            self.anchor_wanted = self._anchor_urgent = True
            self._changed.notify_all()

    def _publish(self) -> None:
        start = time.monotonic()
        attempt = self._prepared()
        trace = attempt.changes.trace
        with trace.current():
            published = self._chain.commit(attempt)
        trace.end(version=published.version)
        with self._changed:
            self._snapshot.apply(attempt.changes.deltas, attempt.states)
            self._waiting = self._rebased(attempt.changes)
            self._in_flight = self._attempt = None
            self._aside_is_next = True
            self._want_periodic_anchor(published.version)
            self._changed.notify_all()
        self._record(attempt, published, time.monotonic() - start)

    def _rebased(self, committed: ChangeSet) -> ChangeSet | None:
        """What waits, relative to the snapshot as it is now; None if the committed version says it all."""
        if self._waiting is None:
            return None
        waiting = rebase(self._waiting, committed)
        if waiting.deltas or waiting.step > committed.step:
            return waiting
        waiting.trace.end()
        return None

    def _prepared(self) -> Attempt:
        """The attempt to commit: the one that failed last time, else the waiting change set, encoded."""
        if self._attempt is None:
            with self._changed:
                if self._in_flight is None:
                    self._in_flight, self._waiting = self._waiting, None
                changes = self._in_flight
            if changes is None:
                raise RuntimeError("publish job without changes")
            with changes.trace.current(), tracing.span("delta_sync.publish.encode", changed_elements=changes.changed):
                self._attempt = replace(self._chain.prepare(changes), metrics=self._metrics.logged())
        return self._attempt

    def _want_periodic_anchor(self, version: int) -> None:
        """One that is due, unless the last one failed just now."""
        failed, pause = self._anchor_failed_at, self._config.anchor_every or RETRY_ANCHOR
        if self._chain.anchor_is_due and (failed is None or version - failed >= pause):
            self.anchor_wanted = True

    def _anchor_now(self) -> None:
        """A whole anchor of the newest version, which somebody waits for."""
        self._allow(self._chain.anchor_bytes)  # of a base, where what is published is an adapter
        while not self._advance_anchor(newest=True):
            pass

    def _next_shard(self) -> None:
        """Of an anchor nobody waits for: one that fails is not insisted on, but due again ``anchor_every`` later."""
        self._aside_is_next = False
        self._allow(self._chain.anchor_bytes)
        try:
            self._advance_anchor(newest=False)
        except StoreError as error:
            self._note_failure(error)
            self._chain.abandon_anchor()
            with self._changed:
                self.anchor_wanted = False
                self._anchor_failed_at = self._chain.newest.version

    def _advance_anchor(self, *, newest: bool) -> bool:
        """Upload one shard; whether the anchor is complete."""
        job = self._chain.advance_anchor(newest=newest)
        if job is None:
            return False
        now = time.monotonic()
        self._healer.anchored(job.version, now)
        with self._changed:
            self.anchor_wanted = self._anchor_urgent = False
            self.trim_due = self._config.keep_anchors is not None
            self._changed.notify_all()
        self._metrics.record(anchor_bytes=job.size, anchor_seconds=now - job.began)
        return True

    def _trim(self) -> None:
        """Delete a few of the objects that ``keep_anchors`` lets go; after a failure again with the next anchor."""
        self._aside_is_next = False
        try:
            self.trim_due = self._chain.trim()
        except DeltaSyncError as error:
            self.trim_due = False
            logger.warning("delta-sync: old versions are not deleted for now: %s", error)

    def _heal(self) -> None:
        """Answer one refusal; the others as they are by then, as what heals one may heal all."""
        with self._changed:
            refusal = next(iter(self._refusals.values()), None)
        if refusal is None:
            return
        self._heal_one(refusal)
        with self._changed:
            if self._refusals.get(refusal.replica) is refusal:
                del self._refusals[refusal.replica]

    def _heal_one(self, refusal: Refusal) -> None:
        republishable = self._chain.can_republish(refusal.version)
        remedy = self._healer.remedy(refusal, republishable=republishable, now=time.monotonic())
        if remedy is None:
            return
        logger.warning(
            "delta-sync: replica %s refused version %d (%s); remedy: %s",
            refusal.replica, refusal.version, refusal.error, remedy,
        )  # fmt: skip
        if remedy == "republish":
            self._chain.republish(refusal.version)
        else:
            self._anchor_now()
        self._healer.applied(refusal, remedy, now=time.monotonic())
        self._metrics.record(heals=1)

    def _idle(self) -> None:
        """Look at acknowledgements; those from before this run are left alone: a live replica says it anew, of ours."""
        self._chain.idle()
        said = self._chain.acknowledged()
        self.report({name: refusal for name, refusal in said.items() if refusal not in self._old_refusals})

    def _record(self, attempt: Attempt, published: Published, seconds: float) -> None:
        changed, size = attempt.changes.changed, attempt.size
        self._metrics.record(
            version=published.version,
            changed_elements=changed,
            changed_fraction=changed / self._snapshot.total_elements,
            bytes=size,
            publish_seconds=seconds,
        )
        if changed:
            self._metrics.record(bytes_per_changed=size / changed)


def _in_place_of(before: ChangeSet | None, changes: ChangeSet) -> ChangeSet:
    """``changes`` hold what waited before them; its trace is over, or theirs where they are of the same step."""
    if before is None:
        return changes
    if before.parts is not None:
        before.parts.abandon()
    if before.step == changes.step:
        changes.trace.end()
        return replace(changes, trace=before.trace)
    before.trace.end(coalesced=True)
    return changes
