"""One file of an anchor, laid out before its contents are at hand: several ranks' pieces are written in any order."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from delta_sync.anchor_files import Head
from delta_sync.dtypes import DType


class OpenShard:
    """A safetensors file whose header is written and whose tensors are zero, until they are assigned.

    OSError where there is no room for all of it.
    """

    def __init__(self, path: Path, heads: Iterable[Head]) -> None:
        self.path = path
        self._places: dict[str, tuple[int, DType, int]] = {}  # first byte, element type, elements
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        at = 0
        for name, kind, shape in heads:
            size = math.prod(shape)
            self._places[name] = (at, kind, size)
            entries[name] = {
                "dtype": kind.name,
                "shape": list(shape),
                "data_offsets": [at, at + size * kind.itemsize],
            }
            at += size * kind.itemsize
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._data = 8 + len(text)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            file.truncate(self._data + at)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, self._data + at)  # an error now, where there is no room, not a signal

    def tensor(self, name: str) -> npt.NDArray[np.unsignedinteger]:
        """A tensor's bits in the file, flat and writable: what is assigned to it is in the file."""
        begin, kind, size = self._places[name]
        if size == 0:
            return np.empty(0, kind.carrier)
        return np.memmap(self.path, kind.carrier, "r+", self._data + begin, (size,))
