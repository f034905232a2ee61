"""The API key check of our routes: vLLM's own middleware guards only its own prefixes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence

ADMIN_KEY = "DELTA_SYNC_ADMIN_KEY"


class KeyRing:
    """Accepts what vLLM accepts: any of --api-key, else VLLM_API_KEY; everything if there is none."""

    def __init__(self, api_keys: Sequence[str] | None) -> None:
        keys = [key for key in (api_keys or [os.environ.get("VLLM_API_KEY", "")]) if key]
        self._hashes = [_hash(key) for key in keys]

    def accepts(self, authorization: str | None) -> bool:
        """True if the Authorization header carries a known bearer key; compared in constant time."""
        if not self._hashes:
            return True
        scheme, _, given = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            return False
        match = False
        for known in self._hashes:
            match |= secrets.compare_digest(_hash(given), known)
        return match


class AdminKey:
    """The key that control asks for: --delta-sync-admin-key, else DELTA_SYNC_ADMIN_KEY; control is off without one."""

    def __init__(self, key: str | None) -> None:
        key = key or os.environ.get(ADMIN_KEY)
        self._keys = KeyRing([key]) if key else None

    @property
    def is_set(self) -> bool:
        """Whether there is one."""
        return self._keys is not None

    def accepts(self, authorization: str | None) -> bool:
        """True if the Authorization header carries it as a bearer key."""
        return self._keys is not None and self._keys.accepts(authorization)


class Secret(str):
    """Text that does not show itself when vLLM logs its arguments."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "'***'"


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
