"""How each system lays changed elements out on the wire, as encoders and decoders over the same changes.

The peers' are written from published descriptions, not from their code: what is not described (a gap too large for
its field) is done in the cheapest way. All carry positions exactly, and bfloat16 values or what restores them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zstandard

from delta_sync import DEFAULT_CODEC, DTYPES, DeltaHeader, TensorDelta, decode_delta, diff, encode_delta, new_bits

LEVEL = 1


@dataclass(frozen=True)
class Changed:
    """One tensor's change: shape, int64 positions ``[n]``, uint16 bits ``[n]`` before and after, and its ULP delta."""

    name: str
    shape: tuple[int, ...]
    positions: np.ndarray
    old: np.ndarray
    new: np.ndarray
    delta: TensorDelta


def changed_elements(name: str, shape: tuple[int, ...], old: np.ndarray, new: np.ndarray) -> Changed:
    """What changed between two images of a tensor, uint16 bits ``[elements]``."""
    delta = diff(name, DTYPES["BF16"], shape, old, new)
    return Changed(name, shape, delta.positions, old[delta.positions], new[delta.positions], delta)


class Layout(ABC):
    """``decode(encode(changes), changes)`` gives each tensor's (positions, new bits), given the old bits only."""

    name: str

    @abstractmethod
    def encode(self, changes: Sequence[Changed]) -> bytes:
        """All tensors' changes as bytes."""

    @abstractmethod
    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        """Positions and new bits of each tensor."""


class IndexValue(Layout):
    """TRL, verl: an int32 index and a bfloat16 value for each changed element."""

    name = "TRL: int32 index + bf16"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        parts = [part for c in changes for part in (c.positions.astype(np.int32).tobytes(), c.new.tobytes())]
        return b"".join(parts)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        at, found = 0, []
        for c in changes:
            n = c.positions.size
            index = np.frombuffer(data, np.int32, n, at)
            found.append((index.astype(np.int64), np.frombuffer(data, np.uint16, n, at + 4 * n)))
            at += 6 * n
        return found


class GapValue(Layout):
    """PULSE / grail: gaps in the narrowest of u8, u16, u32 that fits a tensor, then bfloat16 values, zstd-1."""

    name = "grail/PULSE: u8/u16 gaps + bf16, zstd-1"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        parts: list[bytes] = []
        for c in changes:
            gaps = gaps_of(c.positions)
            width = next(w for w in (1, 2, 4) if not gaps.size or gaps.max() < 2 ** (8 * w))
            parts += [bytes([width]), gaps.astype(f"<u{width}").tobytes(), c.new.tobytes()]
        return compress(b"".join(parts))

    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        content, at, found = zstandard.decompress(data), 0, []
        for c in changes:
            n, width = c.positions.size, content[at]
            gaps = np.frombuffer(content, f"<u{width}", n, at + 1)
            found.append((positions_of(gaps), np.frombuffer(content, np.uint16, n, at + 1 + width * n)))
            at += 1 + (width + 2) * n
        return found


class GapXor(Layout):
    """NeMo-RL: u16 gaps and XOR words, each zstd-1; an XOR of zero carries a gap over 65535."""

    name = "NeMo-RL: u16 gaps + XOR, zstd-1"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        gaps, words = zip(*(self._filled(c) for c in changes), strict=True)
        counts = np.array([g.size for g in gaps], np.uint32).tobytes()
        parts = [compress(b"".join(part.tobytes() for part in kind)) for kind in (gaps, words)]
        return counts + len(parts[0]).to_bytes(8, "little") + b"".join(parts)

    def _filled(self, c: Changed) -> tuple[np.ndarray, np.ndarray]:
        gaps, words = gaps_of(c.positions), c.old ^ c.new
        fillers = gaps // 65536
        if not fillers.any():
            return gaps.astype(np.uint16), words
        at = np.repeat(np.arange(gaps.size), fillers)
        gaps = np.insert(gaps % 65536, at, 65535)
        return gaps.astype(np.uint16), np.insert(words, at, 0)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        counts = np.frombuffer(data, np.uint32, len(changes))
        start = 4 * len(changes) + 8
        split = start + int.from_bytes(data[start - 8 : start], "little")
        gaps = np.frombuffer(zstandard.decompress(data[start:split]), np.uint16)
        words = np.frombuffer(zstandard.decompress(data[split:]), np.uint16)
        ends, found = np.cumsum(counts), []
        for c, end, count in zip(changes, ends, counts, strict=True):
            word = words[end - count : end]
            real = word != 0
            found.append((positions_of(gaps[end - count : end])[real], c.old ^ word[real]))
        return found


class Ours(Layout):
    """delta_sync, whole objects with their headers."""

    name = f"ours: {DEFAULT_CODEC}"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        return encode_delta(DeltaHeader("benchmark", 2, 1, DEFAULT_CODEC), [c.delta for c in changes])

    def decode(self, data: bytes, changes: Sequence[Changed]) -> list[tuple[np.ndarray, np.ndarray]]:
        deltas = decode_delta(data)[1]
        return [(delta.positions, new_bits(delta, c.old)) for delta, c in zip(deltas, changes, strict=True)]


LAYOUTS: tuple[Layout, ...] = (IndexValue(), GapValue(), GapXor(), Ours())


def gaps_of(positions: np.ndarray) -> np.ndarray:
    return np.diff(positions, prepend=-1) - 1


def positions_of(gaps: np.ndarray) -> np.ndarray:
    return np.cumsum(gaps.astype(np.int64) + 1) - 1


def compress(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)
