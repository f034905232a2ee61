"""The bits last published of one rank's shards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_sync.delta import apply, new_bits
from delta_sync.digest import digest_change, digest_region, tensor_key
from delta_sync.dtypes import DType
from delta_sync.errors import MappingError
from delta_sync.tensor_delta import TensorDelta
from trl_callback.layout import Region, Shape, row_major, whole
from trl_callback.shard_image import Piece, ShardImage

Bits = npt.NDArray[np.unsignedinteger]
Key = tuple[str, Region]


@dataclass(frozen=True)
class HeldPiece:
    """A piece of a checkpoint tensor and its last published bits, flat and owned."""

    name: str
    dtype: DType
    shape: Shape
    region: Region
    bits: Bits

    def digest(self) -> int:
        """What the piece adds to its tensor's digest."""
        local = self.region.shape
        key = tensor_key(self.name)
        return digest_region(self.bits, 0, row_major(local), self.region.offset, self.region.strides, local, key)


class ShardSnapshot:
    """A flat carrier array per piece: 2 bytes an element for BF16, of this rank's elements only.

    Deltas in here are per piece, with positions in it; ``published`` turns them into tensors' positions. Not
    thread-safe: whoever coordinates the ranks keeps ``diff`` and ``apply`` apart.
    """

    def __init__(self, image: ShardImage) -> None:
        self._held: dict[Key, HeldPiece] = {}
        for piece in image.pieces():
            key = (piece.name, piece.region)
            if key in self._held:
                raise MappingError(f"tensor {piece.name!r}", expected="one source in the model", got="two")
            self._held[key] = HeldPiece(piece.name, piece.dtype, piece.shape, piece.region,
                                        piece.source.cast().bits.copy())  # fmt: skip

    def __iter__(self) -> Iterator[HeldPiece]:
        """Every piece, always in the same order."""
        return iter(self._held.values())

    @property
    def holds_whole_tensors(self) -> bool:
        """Whether no tensor of this rank has elements elsewhere."""
        return all(piece.region.shape == piece.shape for piece in self)

    def diff(self, image: ShardImage) -> dict[Key, TensorDelta]:
        """What turns the snapshot into ``image``, changed pieces only; MappingError if the model's layout changed."""
        changed: dict[Key, TensorDelta] = {}
        missing = set(self._held)
        for piece in image.pieces():
            held = self._same(piece)
            missing.discard((piece.name, piece.region))
            delta = piece.source.changes(held.bits, (held.bits.size,))
            if delta.changed:
                changed[piece.name, piece.region] = delta
        if missing:
            name = min(name for name, _ in missing)
            raise MappingError(f"tensor {name!r}", expected="in the model, as in the last version", got="gone")
        return changed

    def _same(self, piece: Piece) -> HeldPiece:
        held = self._held.get((piece.name, piece.region))
        if held is None or (held.dtype, held.shape) != (piece.dtype, piece.shape):
            raise MappingError(f"tensor {piece.name!r}", expected="the layout of the last version",
                               got=f"{piece.dtype.name} {list(piece.shape)}, {piece.region}",
                               remedy="don't resize, rename or reshard weights while training")  # fmt: skip
        return held

    def apply(self, deltas: Mapping[Key, TensorDelta]) -> None:
        """Move to the version just committed."""
        for key, delta in deltas.items():
            apply(delta, self._held[key].bits)

    def published(self, deltas: Mapping[Key, TensorDelta]) -> tuple[list[TensorDelta], dict[str, int]]:
        """The deltas by tensor, with positions in the tensors, and by how much each tensor's digest moves."""
        parts: dict[str, list[tuple[npt.NDArray[np.int64], Bits]]] = {}
        sums: dict[str, int] = {}
        for (name, region), delta in deltas.items():
            positions = region.positions(delta.positions)
            old = self._held[name, region].bits[delta.positions]
            change = digest_change(positions, old, new_bits(delta, old), tensor_key(name))
            sums[name] = (sums.get(name, 0) + change) % 2**64
            parts.setdefault(name, []).append((positions, delta.values))
        kinds = {name: self._held[name, region] for name, region in deltas}
        return [_merged(kinds[name], pieces) for name, pieces in parts.items()], sums

    def bits(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Bits:
        """A whole tensor's flat bits, no copy; MappingError where this rank holds a part of it."""
        piece = self._held.get((name, whole(shape)))
        if piece is None:
            raise MappingError(f"tensor {name!r}", expected=f"whole on this rank, {list(shape)}", got="a part of it")
        return piece.bits


def _merged(kind: HeldPiece, pieces: list[tuple[npt.NDArray[np.int64], Bits]]) -> TensorDelta:
    """One delta of a tensor from its pieces', whose positions may interleave."""
    positions = np.concatenate([positions for positions, _ in pieces])
    values = np.concatenate([values for _, values in pieces])
    if len(pieces) > 1:
        order = np.argsort(positions)
        positions, values = positions[order], values[order]
    return TensorDelta(kind.name, kind.dtype, kind.shape, "ulp", positions, values)
