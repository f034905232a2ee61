"""Caps on everything a reader allocates because a file asks for it."""

from __future__ import annotations

from dataclasses import dataclass, replace

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


def for_model(tensors: int) -> Limits:
    """Limits for a reader that knows how many tensors its model has: a hostile manifest costs it no more to parse."""
    most = 2**20 + 4096 * tensors  # a tensor's entry has at most about 1,400 bytes
    return replace(DEFAULT_LIMITS, manifest_bytes=min(most, DEFAULT_LIMITS.manifest_bytes))
