"""What lies in a bucket's folder, kept fresh by the Hub's event feed and a slow listing.

The feed is best effort, so the folder is listed again every minute or so: an event that was lost shows up then. Where
the Hub has no feed for this bucket or token, it is listed every ten seconds instead.
"""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import httpx2

from delta_sync.errors import FormatError, StoreError
from delta_sync.event_lines import event_lines
from delta_sync.store.attempts import Again, Deadline
from delta_sync.store.hub_client import HubClient
from delta_sync.store.hub_tree import list_files
from delta_sync.store.hub_xet import XetFile

RECONCILE_SECONDS = 60.0  # between two listings while the feed works; a page more takes half a minute more
POLL_SECONDS = 10.0  # between two listings without a feed
FEED_AGAIN_SECONDS = 300.0  # until a feed that was refused is asked for again
SILENCE_SECONDS = 45.0  # without a byte; the Hub pings every 30
STALE_SECONDS = 150.0  # without either: the view no longer answers, and reads ask the Hub themselves
TRUSTED_SECONDS = 30.0  # in which a listing, which may come from a cache, does not undo what was seen later
EVENT_CHARACTERS = 16 << 20  # of one event; a change takes some hundred
RECONNECT_SECONDS, SLOWEST_RECONNECT = 1.0, 60.0
_NO_FEED = (401, 403, 404, 501)
log = logging.getLogger(__name__)


class HubView:
    """A thread that knows which file each path stands for."""

    def __init__(self, client: HubClient, top: str) -> None:
        self._client, self._top, self._pid = client, top, os.getpid()
        self._doing = f"follow {client.bucket}"
        self._lock = threading.Lock()
        self._files: dict[str, XetFile] = {}
        self._touched: dict[str, float] = {}  # when an event or a write of our own last said something of a path
        self._fresh = -math.inf
        self._next_listing = -math.inf
        self._feed_refused = -math.inf
        self._cursor: str | None = None
        self.listens = False  # whether the feed tells of changes now
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="delta-sync-hub-view", daemon=True)

    def start(self) -> None:
        """Begin; until the first listing is there ``answers`` is false."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next look; it holds nothing but its connection."""
        self._stop.set()

    @property
    def runs(self) -> bool:
        """Whether its thread does; in a forked child it does not."""
        return self._thread.is_alive() and self._pid == os.getpid()

    @property
    def answers(self) -> bool:
        """Whether what it knows is fresh enough to be used."""
        fresh = time.monotonic() - self._fresh < STALE_SECONDS
        return fresh and not self._stop.is_set() and self.runs

    def find(self, path: str) -> XetFile | None:
        """The file behind a path."""
        return self._files.get(path)

    def starting(self, start: str) -> dict[str, XetFile]:
        """The files whose paths start so."""
        with self._lock:
            return {path: file for path, file in self._files.items() if path.startswith(start)}

    def note(self, path: str, file: XetFile | None) -> None:
        """Somebody knows better: this process wrote or removed it, or an event says so."""
        if not path.startswith(self._top):
            return
        with self._lock:
            self._touched[path] = time.monotonic()
            if file is None:
                self._files.pop(path, None)
            else:
                self._files[path] = file

    # --- the thread

    def _run(self) -> None:
        pause = RECONNECT_SECONDS
        while not self._stop.is_set():
            try:
                if time.monotonic() - self._feed_refused < FEED_AGAIN_SECONDS:
                    self._list()
                    pause = POLL_SECONDS
                elif self._session():
                    pause = RECONNECT_SECONDS
            except Again as again:
                log.info("%s", again.error)
                pause = max(pause, again.after)
            except (StoreError, httpx2.HTTPError) as error:
                log.warning("following %s: %s", self._client.bucket, error)
            except Exception:
                log.exception("following %s: unexpected error, trying again", self._client.bucket)
            self._stop.wait(pause * random.uniform(0.75, 1.25))
            pause = min(2 * pause, SLOWEST_RECONNECT)

    def _session(self) -> bool:
        """One connection to the feed, until it ends; whether it was of use."""
        params = {"cursor": self._cursor} if self._cursor else {}
        with self._client.stream(f"{self._client.api}/events", params, SILENCE_SECONDS, self._doing) as response:
            lines = event_lines(response.iter_bytes(), EVENT_CHARACTERS)
            return self._accepted(response) and self._listen(_events(lines))

    def _accepted(self, response: httpx2.Response) -> bool:
        """Whether this is a feed; if not, what to do next is set, or StoreError or Again raised."""
        is_feed = response.headers.get("content-type", "").startswith("text/event-stream")
        if response.status_code == 200 and is_feed:
            return True
        if response.status_code in (200, *_NO_FEED):
            log.info("%s has no event feed for this token, it is listed every %g s", self._client.bucket, POLL_SECONDS)
            self._feed_refused = time.monotonic()
        elif response.status_code == 400 and self._cursor:
            self._forget_cursor()
        else:
            response.read()
            raise self._client.refusal(response, self._doing)
        return False

    def _listen(self, events: Iterator[tuple[str, dict[str, Any]]]) -> bool:
        """Take what the feed says until it ends; whether it ever got as far as being live."""
        ready = False
        try:
            for name, payload in events:
                self._take(name, payload)
                if name == "reset":
                    self._forget_cursor()
                if self._stop.is_set() or name in ("reset", "reconnect"):
                    return True
                self.listens = ready = ready or name == "ready"
                if ready:
                    if self._fresh > -math.inf:
                        self._fresh = time.monotonic()
                    self._list_if_due()
        except (httpx2.HTTPError, FormatError) as error:  # silence, an end without a word: it may have missed something
            log.debug("the feed of %s ended: %s", self._client.bucket, error)
            self._next_listing = min(self._next_listing, time.monotonic() + SILENCE_SECONDS)
        finally:
            self.listens = False
        return ready

    def _forget_cursor(self) -> None:
        self._cursor, self._next_listing = None, -math.inf

    def _take(self, name: str, payload: dict[str, Any]) -> None:
        if isinstance(payload.get("cursor"), str):
            self._cursor = payload["cursor"]
        if name != "changes" or not isinstance(payload.get("changes"), list):
            return
        for change in (change for change in payload["changes"] if isinstance(change, dict)):
            path, op = change.get("path"), change.get("op")
            if not isinstance(path, str):
                continue
            if op == "delete":
                self.note(path, None)
            elif (file := self._described(change)) is not None:
                self.note(path, file)
            elif op == "add":  # without its hash, which this token may not read: the next listing has it
                self._next_listing = -math.inf

    def _described(self, change: dict[str, Any]) -> XetFile | None:
        """The file after a change, which leaves out what stayed as it was."""
        before = self._files.get(change.get("path", ""))
        xet_hash = change.get("xetHash") or (before and before.hash)
        size = change.get("size", before and before.size)
        return XetFile(xet_hash, size) if isinstance(xet_hash, str) and isinstance(size, int) else None

    def _list_if_due(self) -> None:
        if time.monotonic() < self._next_listing:
            return
        try:
            self._list()
        except StoreError as error:
            log.warning("%s", error)
            self._next_listing = time.monotonic() + POLL_SECONDS

    def _list(self) -> None:
        """Replace what is known by what is listed, except for what became known while or shortly before listing."""
        began = time.monotonic()
        listed = list_files(self._client, self._top, Deadline(60.0 + STALE_SECONDS), f"list {self._client.bucket}")
        with self._lock:
            later = {path for path, when in self._touched.items() if when > began - TRUSTED_SECONDS}
            kept = {path: file for path, file in self._files.items() if path in later}
            gone = later - kept.keys()
            self._files = {path: file for path, file in listed.items() if path not in gone} | kept
            self._touched = {path: self._touched[path] for path in later}
        self._fresh = time.monotonic()
        seconds = RECONCILE_SECONDS + len(listed) / 1000 * RECONCILE_SECONDS / 2
        self._next_listing = self._fresh + seconds * random.uniform(0.75, 1.25)


def _events(lines: Iterator[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Server-sent events by name; ("", {}) for the comments that only show that the connection lives."""
    name, data = "", ""
    for line in lines:
        field, _, value = line.partition(":")
        if line == "":
            payload: Any = None
            with suppress(ValueError):
                payload = json.loads(data or "{}")
            if name and isinstance(payload, dict):
                yield name, payload
            name, data = "", ""
        elif field == "event":
            name = value.strip()
        elif field == "data":
            data += value.removeprefix(" ") + "\n"
            if len(data) > EVENT_CHARACTERS:
                raise httpx2.ReadError(f"an event of more than {EVENT_CHARACTERS} characters")
        elif field == "":
            yield "", {}
