"""How each system lays a step's changes out on the wire, as encoders and decoders over the same tensors.

The peers' are written from published descriptions, not from their code: what is not described (a gap too large for
its field) is done in the cheapest way. All restore every position and bit of 16-bit elements. For comparisons only:
nothing that publishes or serves uses them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.context_file import Change, decode_against, encode_against
from delta_sync.delta import diff, new_bits
from delta_sync.delta_file import DeltaHeader, decode_delta, encode_delta
from delta_sync.dtypes import DTYPES, DType
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.tensor_delta import TensorDelta

LEVEL = 1
BF16 = DTYPES["BF16"]
Array = npt.NDArray[Any]
Restored = list[tuple[Array, Array]]  # of each tensor: positions, int64 ``[n]``, and new bits, uint16 ``[n]``


@dataclass(frozen=True)
class Changed:
    """One tensor's change: uint16 bits of all elements before and after, ``[elements]``, and its ULP delta."""

    name: str
    shape: tuple[int, ...]
    before: Array
    after: Array
    delta: TensorDelta

    @property
    def positions(self) -> Array:
        """Flat indices of what changed, int64 ``[n]``."""
        return self.delta.positions

    @property
    def old(self) -> Array:
        """The changed elements' bits before, uint16 ``[n]``."""
        return np.asarray(self.before[self.positions])

    @property
    def new(self) -> Array:
        """The changed elements' bits after, uint16 ``[n]``."""
        return np.asarray(self.after[self.positions])

    @property
    def whole(self) -> Change:
        """The same as the context codec takes it."""
        return Change(self.name, self.delta.dtype, self.shape, self.before, self.after)


def changed_elements(name: str, shape: tuple[int, ...], old: Array, new: Array, dtype: DType = BF16) -> Changed:
    """What changed between two images of a tensor, uint16 bits ``[elements]``."""
    return Changed(name, shape, old, new, diff(name, dtype, shape, old, new))


class Layout(ABC):
    """``decode(encode(changes), changes)`` restores each tensor's changes, and may look at the old bits only."""

    name: str
    finds = False  # whether encode itself finds what changed, and not only codes what ``delta`` names

    @abstractmethod
    def encode(self, changes: Sequence[Changed]) -> bytes:
        """All tensors' changes as bytes."""

    @abstractmethod
    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""


class IndexValue(Layout):
    """TRL, verl: an int32 index and a bfloat16 value for each changed element."""

    name = "TRL: int32 index + bf16"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        """Each tensor's indices, then its values."""
        parts = [part for c in changes for part in (c.positions.astype(np.int32).tobytes(), c.new.tobytes())]
        return b"".join(parts)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
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
        """Width, gaps and values of each tensor, all in one frame."""
        parts: list[bytes] = []
        for c in changes:
            gaps = gaps_of(c.positions)
            width = next(w for w in (1, 2, 4, 8) if not gaps.size or gaps.max() < 2 ** (8 * w))
            parts += [bytes([width]), gaps.astype(f"<u{width}").tobytes(), c.new.tobytes()]
        return compress(b"".join(parts))

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
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
        """Counts, then all gaps in one frame and all words in another."""
        gaps, words = zip(*(_filled(c) for c in changes), strict=True)
        counts = np.array([g.size for g in gaps], np.uint32).tobytes()
        parts = [compress(b"".join(part.tobytes() for part in kind)) for kind in (gaps, words)]
        return counts + len(parts[0]).to_bytes(8, "little") + b"".join(parts)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
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


class WholeXor(Layout):
    """XOR of all elements of each changed tensor, zstd-1: what a general compressor gets without positions."""

    name = "XOR of whole tensors, zstd-1"
    finds = True

    def encode(self, changes: Sequence[Changed]) -> bytes:
        """A frame for each tensor, behind their sizes."""
        frames = [compress(np.bitwise_xor(c.before, c.after).data) for c in changes]
        return np.array([len(frame) for frame in frames], np.uint64).tobytes() + b"".join(frames)

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
        sizes = np.frombuffer(data, np.uint64, len(changes)).tolist()
        at, found = 8 * len(changes), []
        for c, size in zip(changes, sizes, strict=True):
            words = np.frombuffer(zstandard.decompress(data[at : at + size]), np.uint16)
            positions = np.flatnonzero(words)
            found.append((positions, c.before[positions] ^ words[positions]))
            at += size
        return found


class Gap(Layout):
    """delta_sync's gap codec, whole objects with their headers."""

    name = f"ours: {DEFAULT_CODEC}"

    def encode(self, changes: Sequence[Changed]) -> bytes:
        """One object."""
        return encode_delta(DeltaHeader("comparison", 2, 1, DEFAULT_CODEC), [c.delta for c in changes])

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
        deltas = {delta.name: delta for delta in decode_delta(data)[1]}
        return [_restored(deltas[c.name], c) for c in changes]


class Context(Layout):
    """delta_sync's context codec, whole objects with their headers; the gap codec's where those are smaller."""

    name = f"ours: {CONTEXT_CODEC}"
    finds = True

    def encode(self, changes: Sequence[Changed]) -> bytes:
        """One object."""
        return encode_against(DeltaHeader("comparison", 2, 1, CONTEXT_CODEC), [c.whole for c in changes])[1]

    def decode(self, data: bytes, changes: Sequence[Changed]) -> Restored:
        """Positions and new bits of each tensor."""
        old = {c.name: c.before for c in changes}
        deltas = {d.name: d for d in decode_against(data, lambda name, dtype, shape: old[name])[1]}
        return [_restored(deltas[c.name], c) for c in changes]


LAYOUTS: tuple[Layout, ...] = (IndexValue(), GapValue(), GapXor(), WholeXor(), Gap(), Context())


def gaps_of(positions: Array) -> Array:
    """Unchanged elements before each changed one."""
    return np.asarray(np.diff(positions, prepend=-1) - 1)


def positions_of(gaps: Array) -> Array:
    """What ``gaps_of`` was made of, int64 ``[n]``."""
    return np.asarray(np.cumsum(gaps.astype(np.int64) + 1) - 1)


def compress(data: bytes | memoryview) -> bytes:
    """One zstd frame at the level that all are compared at."""
    return zstandard.ZstdCompressor(level=LEVEL).compress(data)


def _filled(c: Changed) -> tuple[Array, Array]:
    """u16 gaps and XOR words of a tensor, with fillers for what does not fit."""
    gaps, words = gaps_of(c.positions), c.old ^ c.new
    fillers = gaps // 65536
    if not fillers.any():
        return gaps.astype(np.uint16), words
    at = np.repeat(np.arange(gaps.size), fillers)
    gaps = np.insert(gaps % 65536, at, 65535)
    return gaps.astype(np.uint16), np.insert(words, at, 0)


def _restored(delta: TensorDelta, c: Changed) -> tuple[Array, Array]:
    return delta.positions, new_bits(delta, np.asarray(c.before[delta.positions]))
