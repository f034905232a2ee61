"""Cache salt: prompts and images cached under older weights are found only as far as a version's policy allows."""

from __future__ import annotations

import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

from delta_sync.manifest import PromptCache

ATTRIBUTE = "delta_sync_salted"
_SESSIONS = 65536  # remembered; the one idle longest begins anew, which is always safe


class HashedRequest(Protocol):
    """The part of vLLM's Request that the salt touches."""

    cache_salt: str | None
    block_hashes: list[Any]
    mm_features: list[Any]
    num_preemptions: int

    def update_block_hashes(self) -> None:
        """Append hashes of full blocks that have none yet."""


class CacheSalt:
    """A commit generation that only grows, under a nonce no other engine run shares (caches may outlive a run).

    Requests see the blocks cached since generation ``current``: the last one whose commit closed the cache,
    or, for a session that such a commit let go on, the one in which it began. Safe to call from any thread.
    """

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._sessions: OrderedDict[str, int] = OrderedDict()
        self._open = 0
        self.generation = 0

    def advance(self, keep: PromptCache = "none") -> None:
        """A commit or a rollback happened. What was cached before may be found by nobody ("none"), by sessions that
        began before it ("new_session": only new ones begin without), or by "all".
        """
        with self._lock:
            self.generation += 1
            if keep != "all":
                self._open = self.generation
            if keep == "none":
                self._sessions.clear()

    def current(self, session: str | None = None) -> int:
        """The generation whose blocks a request may find; a session's first request sets it for the session."""
        with self._lock:
            if session is None:
                return self._open
            found = self._sessions.setdefault(session, self._open)
            self._sessions.move_to_end(session)
            if len(self._sessions) > _SESSIONS:
                self._sessions.popitem(last=False)
            return found

    def combine(self, generation: int, user_salt: str | None) -> str:
        """The salt of a generation for a request that asked for ``user_salt``."""
        return f"delta-sync/{self._nonce}/{generation}/{user_salt or ''}"


class Salted:
    """Remembers what one request asked for and which generation its block hashes and its images' names belong to."""

    __slots__ = ("generation", "release", "salt", "session", "user_salt")

    def __init__(self, salt: CacheSalt, user_salt: str | None, session: str | None = None) -> None:
        self.salt, self.user_salt, self.session = salt, user_salt, session
        self.generation = salt.current(session)
        self.release: Callable[[Any], None] | None = None  # gives back what a request holds of cached images

    @property
    def cache_salt(self) -> str:
        """What the request's cache_salt must be."""
        return self.salt.combine(self.generation, self.user_salt)

    def renamed(self, features: Sequence[Any], before: int | None = None) -> list[Any]:
        """Copies of the features under names of this generation; ``before``: that of the names they have.

        vLLM keeps what it made of an image under ``identifier`` alone, for other requests too. ``mm_hash``, by which
        the processor's output is kept, stays. Copies, because the requests of one ``n`` share the features.
        """
        old = "" if before is None else self.salt.combine(before, None)
        return [
            replace(feature, identifier=self.salt.combine(self.generation, feature.identifier.removeprefix(old)))
            for feature in features
        ]

    def refresh(self, request: HashedRequest) -> bool:
        """Hash the request's blocks anew if its cache was closed since; True if it was.

        Called when the scheduler is about to look a request up in the prefix cache, so that only requests
        without computed tokens change: new, waiting and preempted ones. Running requests keep their hashes,
        which no later request can have. Images of preempted ones keep their names, by which the workers know them.
        """
        current = self.salt.current(self.session)
        if self.generation == current:
            return False
        before, self.generation = self.generation, current
        if request.mm_features and not request.num_preemptions:
            if self.release is not None:  # under the old names, before they are lost
                self.release(request)
            request.mm_features = self.renamed(request.mm_features, before)
        request.cache_salt = self.cache_salt
        request.block_hashes = []
        request.update_block_hashes()
        return True
