"""A name for this replica in acknowledgements and status."""

from __future__ import annotations

import re
import secrets
import socket

from delta_sync.errors import FormatError

_ALLOWED = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,126}")


def replica_id(configured: str | None, engine_index: int | None = None) -> str:
    """The configured name, or host and a random suffix; an engine of a data-parallel group adds its index.

    FormatError if the configured name cannot be a key's last segment.
    """
    if configured is None:
        host = re.sub(r"[^A-Za-z0-9._-]", "-", socket.gethostname()).strip("._-")[:64] or "replica"
        name = f"{host}-{secrets.token_hex(4)}"
    elif _ALLOWED.fullmatch(configured):
        name = configured
    else:
        raise FormatError("delta_sync config 'replica'", expected="letters, digits, '.', '_', '-'", got=configured)
    return name if engine_index is None else f"{name}-dp{engine_index}"
