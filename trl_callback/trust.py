"""Whether a server takes what this trainer signs; asked before anything waits for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from delta_sync.errors import SignatureError

if TYPE_CHECKING:
    from delta_sync.keys import SigningKey


def check_trusted(key: SigningKey | None, pinned: Sequence[str], url: str) -> None:
    """SignatureError where the server pins public keys of which none is this trainer's: it would refuse everything."""
    if not pinned or (key is not None and key.id in pinned):
        return
    raise SignatureError(
        f"what this trainer publishes to {url}",
        expected=f"a signature of a key that is pinned there ({', '.join(pinned)})",
        got="none" if key is None else f"one of key {key.id}",
        remedy="set signing_key to the file of a key that is pinned there, or pin this trainer's key there with "
        "--delta-sync-public-key",
    )
