"""The API key check of our routes: vLLM's own middleware guards only its own prefixes."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Sequence


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


def _hash(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
