"""One run mirrored to several destinations at once, none of which holds up another."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from delta_sync.errors import ConflictError, DeltaSyncError, NotFoundError, StoreError
from delta_sync.mirror import Mirror, Stopped
from delta_sync.signing import PublicKeys
from delta_sync.store.base import Store
from delta_sync.store.cache import ObjectCache

TRIES = 6  # in a row without anything copied, before a mirror that is to end gives up
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0  # seconds between two tries, doubled from one to the next
State = Literal["starting", "waiting", "copying", "current", "damaged", "retrying", "refused"]
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """``once``: end when all that is there now is copied; ``poll``: seconds between two looks at the source.

    The others are those of Mirror.
    """

    once: bool = False
    from_anchor: bool = False
    check: bool = False
    poll: float = 1.0
    keys: PublicKeys | None = None


@dataclass(frozen=True)
class Line:
    """Where the copy at one destination stands.

    ``state``: "starting", "waiting" (the source has no version), "copying", "current", "damaged" (the source lacks
    something, the rest is copied), "retrying" (a store fails) or "refused" (the destination is another's: ended).
    """

    uri: str
    state: State = "starting"
    version: int | None = None
    newest: int | None = None
    objects: int = 0
    bytes: int = 0
    tries: int = 0
    problems: tuple[str, ...] = ()


class Copying(threading.Thread):
    """The thread of one destination; ``open_target`` may fail, and is then tried again like all else."""

    def __init__(
        self, source: Store, uri: str, open_target: Callable[[], Store], cache: ObjectCache, options: Options,
        stop: threading.Event,
    ) -> None:  # fmt: skip
        super().__init__(name=f"delta-sync-mirror-{uri}", daemon=True)
        self._source, self._uri, self._open, self._cache = source, uri, open_target, cache
        self._options, self._stop_event = options, stop
        self._mirror: Mirror | None = None
        self._state: State = "starting"
        self._problems: tuple[str, ...] = ()
        self._tries = 0

    def line(self) -> Line:
        """Where it stands now."""
        mirror = self._mirror
        if mirror is None:
            return Line(self._uri, self._state, tries=self._tries, problems=self._problems)
        version = mirror.reached.version if mirror.reached else None
        newest = mirror.newest.version if mirror.newest else None
        return Line(self._uri, self._state, version, newest, *mirror.written, self._tries, self._problems)

    def run(self) -> None:
        """Copy until stopped, refused or, with ``once``, done."""
        best = -1
        while not self._stop_event.is_set():
            try:
                self._state, self._problems = self._turn()
            except Stopped:
                return
            done = self._state in ("current", "waiting")
            progress = self._mirror.progress if self._mirror else 0
            self._tries = 0 if done or progress > best else self._tries + 1
            best = max(best, progress)
            if self._state == "refused" or (self._options.once and (done or self._tries >= TRIES)):
                return
            pause = self._options.poll if done else min(FIRST_PAUSE * 2**self._tries, LONGEST_PAUSE)
            self._stop_event.wait(pause * random.uniform(0.75, 1.25))

    def _turn(self) -> tuple[State, tuple[str, ...]]:
        """One pass over the source, and what came of it."""
        try:
            if self._mirror is None:
                o = self._options
                self._mirror = Mirror(
                    self._source, self._open(), self._cache,
                    from_anchor=o.from_anchor, check=o.check, poll=o.poll, stop=self._stop_event, keys=o.keys,
                )  # fmt: skip
            if self._state == "starting":
                self._state = "copying"
            whole = self._mirror.copy()
        except ConflictError as error:
            return "refused", (str(error),)
        except DeltaSyncError as error:
            failed = isinstance(error, StoreError) and not isinstance(error, NotFoundError)
            return "retrying" if failed else "damaged", (str(error),)
        except Stopped:
            raise
        except Exception as error:
            log.exception("mirror to %s: unexpected error, trying again", self._uri)
            return "retrying", (f"{type(error).__name__}: {error}",)
        if self._mirror.newest is None:
            return "waiting", ()
        return "current" if whole else "damaged", tuple(str(error) for error in self._mirror.damage.values())


def fan_out(
    source: Store,
    targets: Mapping[str, Callable[[], Store]],
    cache: ObjectCache,
    options: Options,
    stop: threading.Event,
) -> list[Copying]:
    """Start a thread for each destination, named by its URI; they share downloads by way of ``cache``."""
    threads = [Copying(source, uri, open_target, cache, options, stop) for uri, open_target in targets.items()]
    for thread in threads:
        thread.start()
    return threads
