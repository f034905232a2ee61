"""Prefix-cache salt: cached blocks of one commit generation are never found by requests of another."""

from __future__ import annotations

import secrets
from typing import Any, Protocol

ATTRIBUTE = "delta_sync_salted"


class HashedRequest(Protocol):
    """The part of vLLM's Request that the salt touches."""

    cache_salt: str | None
    block_hashes: list[Any]

    def update_block_hashes(self) -> None:
        """Append hashes of full blocks that have none yet."""


class CacheSalt:
    """A commit generation that only grows, under a nonce no other engine run shares (caches may outlive a run)."""

    def __init__(self) -> None:
        self._nonce = secrets.token_hex(8)
        self.generation = 0

    def advance(self) -> None:
        """A commit or a rollback happened: nothing cached before may be found again."""
        self.generation += 1

    def combine(self, generation: int, user_salt: str | None) -> str:
        """The salt of a generation for a request that asked for ``user_salt``."""
        return f"delta-sync/{self._nonce}/{generation}/{user_salt or ''}"


class Salted:
    """Remembers what one request asked for and which generation its block hashes belong to."""

    __slots__ = ("generation", "salt", "user_salt")

    def __init__(self, salt: CacheSalt, user_salt: str | None) -> None:
        self.salt, self.user_salt, self.generation = salt, user_salt, salt.generation

    @property
    def cache_salt(self) -> str:
        """What the request's cache_salt must be."""
        return self.salt.combine(self.generation, self.user_salt)

    def refresh(self, request: HashedRequest) -> bool:
        """Hash the request's blocks anew if a commit happened since; True if it did.

        Called when the scheduler is about to look a request up in the prefix cache, so that only requests
        without computed tokens change: new, waiting and preempted ones. Running requests keep their hashes,
        which no later request can have.
        """
        if self.generation == self.salt.generation:
            return False
        self.generation = self.salt.generation
        request.cache_salt = self.cache_salt
        request.block_hashes = []
        request.update_block_hashes()
        return True
