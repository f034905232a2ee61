"""The two binary formats that a Xet client uploads: xorbs, blocks of chunks, and shards, what files are made of."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

_ENTRY = 48  # bytes of every record in a shard
_END = b"\xff" * 32
_WITH_VERIFICATION, _WITH_METADATA = 1 << 31, 1 << 30


@dataclass(frozen=True)
class Chunk:
    """One chunk of a xorb: where its stored bytes lie, header included, and how long it is unpacked."""

    start: int
    end: int
    size: int


@dataclass(frozen=True)
class Term:
    """Consecutive chunks of one xorb that are a piece of a file."""

    xorb: str
    size: int
    first: int
    last: int  # exclusive


def hash_text(raw: bytes) -> str:
    """How Xet writes a 32-byte hash: four little-endian words in hex."""
    return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))


def chunks_of(xorb: bytes) -> list[Chunk]:
    """Every chunk of an uploaded xorb; a footer, if there is one, is left out."""
    found: list[Chunk] = []
    at = 0
    while at + 8 <= len(xorb) and xorb[at : at + 7] != b"XETBLOB":
        packed, size = int.from_bytes(xorb[at + 1 : at + 4], "little"), int.from_bytes(xorb[at + 5 : at + 8], "little")
        end = at + 8 + packed
        if xorb[at] != 0 or end > len(xorb):
            raise ValueError(f"no chunk at byte {at} of a xorb of {len(xorb)} bytes")
        found.append(Chunk(at, end, size))
        at = end
    return found


def files_of(shard: bytes) -> Iterator[tuple[str, list[Term]]]:
    """Every file that a shard describes: its hash and its terms in order."""
    at = _ENTRY  # after the header
    while shard[at : at + 32] != _END:
        name = hash_text(shard[at : at + 32])
        flags, count = struct.unpack_from("<II", shard, at + 32)
        at += _ENTRY
        yield name, [_term(shard, at + number * _ENTRY) for number in range(count)]
        at += _ENTRY * (count * (2 if flags & _WITH_VERIFICATION else 1) + (1 if flags & _WITH_METADATA else 0))


def _term(shard: bytes, at: int) -> Term:
    _, size, first, last = struct.unpack_from("<IIII", shard, at + 32)
    return Term(hash_text(shard[at : at + 32]), size, first, last)
