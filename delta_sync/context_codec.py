"""The codec "context8-ulp8-zstd": gaps counted among elements of a class of old bits, and steps coded by class.

Both sides hold the old bits, so what they tell about a change is free on the wire. docs/FORMAT.md 5.4 specifies it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_sync.bitmap import Bits
from delta_sync.context_model import Tile, field
from delta_sync.dtypes import DType

CONTEXT_CODEC = "context8-ulp8-zstd"
STREAMS = ("table", "count", "gap", "low", "step", "step_ext", "sign")


@dataclass(frozen=True)
class Layer:
    """One tensor to code or decode: its flat old bits, the tiles it is cut into, and of which a reader has the bits."""

    old: Bits
    tiles: tuple[Tile, ...]
    held: tuple[bool, ...] | None = None  # None: all


def context_field(dtype: DType) -> tuple[np.unsignedinteger, np.unsignedinteger]:
    """Shift and mask of an element's context, of the element's own type."""
    shift, mask = field(dtype)
    return dtype.carrier.type(shift), dtype.carrier.type(mask)


def place(tile: Tile) -> tuple[np.uint64, np.uint64, np.uint64, np.uint64]:
    """A tile as the compiled passes take it."""
    return np.uint64(tile.start), np.uint64(tile.stride), np.uint64(tile.rows), np.uint64(tile.length)
