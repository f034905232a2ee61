"""``delta-sync doctor``: whether a store does what a run needs, how fast, and what to do if not."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import statistics
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

import typer

from delta_sync.cli.report import FINE, PROBLEM, UNREACHABLE, AsJson, Report, Table, finish, many, size
from delta_sync.cli.run import checked_run
from delta_sync.cli.timed_store import TimedStore
from delta_sync.errors import ConflictError, DeltaSyncError, NotFoundError
from delta_sync.ledger import Ledger
from delta_sync.store.keys import ANCHORS, HEAD
from delta_sync.store.local import LocalStore
from delta_sync.store.open import shown_uri

SMALL, LARGE, TIMES = 1024, 8 * 1024**2, 5
SLOW_SECONDS, SKEW_SECONDS, WATCH_SECONDS, FREE_BYTES = 2.0, 5.0, 15.0, 1024**3
Result = Literal["ok", "warn", "fail", "n/a"]


def doctor(
    uri: Annotated[str, typer.Argument(metavar="URI", callback=checked_run, help="The run's folder or bucket.")],
    read_only: Annotated[bool, typer.Option("--read-only", help="Write nothing: for a replica's credentials.")] = False,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds after which a call to the store has failed.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Check credentials, speed, create-only writes, listings, watch, clock and space, and say what to do.

    What it writes lies under doctor/ and is removed again. Exits with 1 if a check failed, with 3 if the store cannot
    be reached.
    """
    finish(as_json, lambda: _report(_Doctor(uri, timeout), read_only))


@dataclass(frozen=True)
class Check:
    """One thing that was looked at: ``found``, and what to do about it."""

    name: str
    result: Result
    found: str
    advice: str = ""


@dataclass
class _Doctor:
    uri: str
    timeout: float
    checks: list[Check] = field(default_factory=list)
    scratch: str = field(default_factory=lambda: f"doctor/{uuid.uuid4().hex}/")
    written: list[str] = field(default_factory=list)

    def look(self, read_only: bool) -> bool:
        """Make every check; False if the store could not even be listed."""
        if not self._check("reach", self._reach):
            return False
        self._check("run", self._run)
        if not read_only and not self._check("credentials", self._credentials):
            self._check("clean-up", self._clean_up)
            return True
        if read_only:
            self._check("small reads", self._small_reads)
            self._check("bandwidth down", self._download)
        else:
            try:
                self._check("small writes", self._small_writes)
                self._check("small reads", self._small_reads)
                self._check("bandwidth up", self._upload)
                self._check("bandwidth down", self._download)
                self._check("create-only", self._create_only)
                self._check("listing", self._listing)
                self._check("watch", self._watch)
                self._check("clock", self._clock)
            finally:
                self._check("clean-up", self._clean_up)
        self._check("free space", self._free_space)
        return True

    def _check(self, name: str, look: Callable[[], Check]) -> bool:
        try:
            self.checks.append(look())
        except DeltaSyncError as error:
            got = f"{error.what}: {error.got}" if error.got else error.what
            self.checks.append(Check(name, "fail", got, error.remedy or "look at the store"))
        return self.checks[-1].result != "fail"

    # --- what is looked at

    def _reach(self) -> Check:
        start = time.monotonic()
        self.store = TimedStore(self.uri, self.timeout)
        self.inner = self.store.inner
        self.new = isinstance(self.inner, LocalStore) and not self.inner.root.exists()
        listed = sum(1 for _ in self.store.list("epochs/"))
        return Check("reach", "ok", f"opened and listed in {_time(time.monotonic() - start)}, {many(listed, 'epoch')}")

    def _run(self) -> Check:
        head = Ledger(self.store).head()
        if head is None:
            return Check("run", "n/a", "none here yet", "a trainer's first publish makes it")
        return Check("run", "ok", f"{head.run}, version {head.version}, epoch {head.epoch}")

    def _credentials(self) -> Check:
        key = f"{self.scratch}credentials"
        self._put(key, b"x")
        self.store.get(key, max_bytes=64)
        self.store.delete(key)
        return Check("credentials", "ok", "may list, read, write and delete")

    def _small_writes(self) -> Check:
        keys = [f"{self.scratch}small-{k}" for k in range(TIMES)]
        median = _median(lambda key: self._put(key, random.randbytes(SMALL)), keys)
        return _timed("small writes", median, "a publish makes three writes: use a bucket nearer to the trainer")

    def _small_reads(self) -> Check:
        keys = [key for key in self.written if "/small-" in key]
        if not keys:
            try:
                self.store.info(HEAD)
            except NotFoundError:
                return Check("small reads", "n/a", "nothing here to read", "look again once a trainer has published")
            keys = [HEAD] * TIMES
        median = _median(lambda key: self.store.get(key, max_bytes=SMALL * 64), keys)
        return _timed("small reads", median, "a replica sees a version after three reads: use a bucket nearer to it")

    def _upload(self) -> Check:
        start = time.monotonic()
        self._put(f"{self.scratch}large", random.randbytes(LARGE))
        return _speed("bandwidth up", LARGE, time.monotonic() - start)

    def _download(self) -> Check:
        key, count = f"{self.scratch}large", LARGE
        if key not in self.written:
            found = max(self.store.list(ANCHORS), key=lambda info: info.size, default=None)
            if found is None or found.size < LARGE:
                return Check("bandwidth down", "n/a", f"no anchor with a file of {size(LARGE)} to read")
            key = found.key
        start = time.monotonic()
        self.store.read_range(key, 0, count)
        return _speed("bandwidth down", count, time.monotonic() - start)

    def _create_only(self) -> Check:
        key = f"{self.scratch}created"
        self.written.append(key)
        self.store.create(key, b"first")
        if not self._refuses(key):
            advice = "use another store: here two trainers could write the same version"
            return Check("create-only", "fail", "the second of two was not refused", advice)
        if (got := self.store.get(key, max_bytes=64)) != b"first":
            return Check("create-only", "fail", f"the first one's content became {got!r}", "use another store")
        if self.store.uri.startswith("hf://") or os.environ.get("DELTA_SYNC_UNFENCED") == "1":
            advice = "never start two trainers on this run"
            return Check("create-only", "warn", "by looking first: a second trainer is detected, not prevented", advice)
        return Check("create-only", "ok", "the second of two writes was refused")

    def _refuses(self, key: str) -> bool:
        try:
            self.store.create(key, b"second")
        except ConflictError:
            return True
        return False

    def _listing(self) -> Check:
        key = f"{self.scratch}listed"
        self._put(key, b"x")
        if key not in self._keys():
            advice = "use a store with consistent listings: replicas would miss versions for a while"
            return Check("listing", "fail", "an object just written is not listed", advice)
        self.store.delete(key)
        if key in self._keys():
            return Check("listing", "warn", "an object just deleted is still listed", "harmless for runs")
        return Check("listing", "ok", "shows at once what was written and deleted")

    def _clock(self) -> Check:
        key = f"{self.scratch}clock"
        self._put(key, b"x")
        now = time.time()
        written = self.store.written_at(key)
        if written is None:
            return Check("clock", "n/a", "this kind of store tells no time")
        if abs(skew := written - now) > SKEW_SECONDS:
            return Check("clock", "warn", f"the store's differs by {skew:+.0f} s", "set both clocks by NTP")
        return Check("clock", "ok", f"the store's differs by less than {SKEW_SECONDS:.0f} s")

    def _watch(self) -> Check:
        """How long a follower that is told of changes takes to see one."""
        if not self.store.uri.startswith("hf://"):
            return Check("watch", "n/a", "this kind of store tells nobody of changes: replicas look for them")
        follower = TimedStore(self.uri, self.timeout)
        follower.follow()
        try:
            if not _until(lambda: follower.inner.listens, WATCH_SECONDS):  # type: ignore[attr-defined]
                advice = "use a token that may read the bucket's events, or be content with some seconds"
                return Check("watch", "warn", f"no event feed within {WATCH_SECONDS:.0f} s: it is listed", advice)
            key = f"{self.scratch}watched"
            self._put(key, b"x")
            start = time.monotonic()
            if _until(lambda: self._sees(follower, key), WATCH_SECONDS):
                return Check("watch", "ok", f"told of a write after {_time(time.monotonic() - start)}")
            advice = "replicas see a version at the next listing, about a minute later: try again"
            return Check("watch", "warn", f"not told of a write within {WATCH_SECONDS:.0f} s", advice)
        finally:
            follower.inner.close()  # type: ignore[attr-defined]

    def _sees(self, follower: TimedStore, key: str) -> bool:
        try:
            return follower.info(key).size > 0
        except NotFoundError:
            return False

    def _free_space(self) -> Check:
        if not isinstance(self.inner, LocalStore):
            return Check("free space", "n/a", "this kind of store has no end of its own")
        place = self.inner.root
        while not place.exists():
            place = place.parent
        free = shutil.disk_usage(place).free
        if free < FREE_BYTES:
            return Check("free space", "warn", size(free), "free some: every anchor takes as much as the model")
        return Check("free space", "ok", size(free))

    # --- what is written, and removed again

    def _put(self, key: str, data: bytes) -> None:
        self.written.append(key)
        self.store.put(key, data)

    def _keys(self) -> set[str]:
        return {info.key for info in self.store.list(self.scratch)}

    def _clean_up(self) -> Check:
        for key in self.written:
            self.store.delete(key)
        if left := sorted(self._keys()):
            return Check("clean-up", "warn", f"{len(left)} objects left", f"delete {self.scratch}")
        if isinstance(self.inner, LocalStore):
            with contextlib.suppress(OSError):  # not empty: somebody else's
                for folder in (self.inner.root / self.scratch, self.inner.root / "doctor"):
                    folder.rmdir()
                if self.new:
                    self.inner.root.rmdir()
        if isinstance(self.inner, LocalStore) or self.store.uri.startswith("hf://"):
            return Check("clean-up", "ok", "nothing left behind")
        return Check("clean-up", "ok", "nothing left but the store's own probe, which trainers write too")


def _report(patient: _Doctor, read_only: bool) -> Report:
    reached = patient.look(read_only)
    failed = any(check.result == "fail" for check in patient.checks)
    code = UNREACHABLE if not reached else PROBLEM if failed else FINE
    uri = shown_uri(patient.uri)
    document: dict[str, object] = {
        "uri": uri,
        "read_only": read_only,
        "checks": [vars(check) for check in patient.checks],
    }
    rows = [[check.name, check.result, check.found, check.advice or "-"] for check in patient.checks]
    return Report(document, [Table(uri, ("check", "result", "found", "what to do"), rows)], code)


def _until(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def _median(call: Callable[[str], object], keys: list[str]) -> float:
    def times() -> Iterator[float]:
        for key in keys:
            start = time.monotonic()
            call(key)
            yield time.monotonic() - start

    return statistics.median(times())


def _timed(name: str, median: float, advice: str) -> Check:
    found = f"median of {TIMES}: {_time(median)}"
    return Check(name, "ok", found) if median < SLOW_SECONDS else Check(name, "warn", found, advice)


def _speed(name: str, count: int, seconds: float) -> Check:
    return Check(name, "ok", f"{size(int(count / seconds))}/s, {size(count)} in {_time(seconds)}")


def _time(seconds: float) -> str:
    return f"{1000 * seconds:.1f} ms" if seconds < 1 else f"{seconds:.1f} s"
