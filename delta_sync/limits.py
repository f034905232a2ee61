"""Caps on everything a reader allocates because a file asks for it."""

from __future__ import annotations

from dataclasses import dataclass

GiB = 1024**3


@dataclass(frozen=True)
class Limits:
    """Upper bounds a reader enforces before allocating; sizes in bytes."""

    manifest_bytes: int = 256 * 1024**2
    header_bytes: int = 64 * 1024**2
    object_bytes: int = 64 * GiB
    decoded_bytes: int = 64 * GiB
    tensors: int = 1_000_000
    name_bytes: int = 1024
    rank: int = 16
    elements: int = 2**44
    objects: int = 100_000
    chain: int = 100_000


DEFAULT_LIMITS = Limits()
