"""Anchor files laid out before their contents are at hand: several ranks' pieces are written in any order."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import numpy.typing as npt

from delta_sync.anchor_files import INDEX, SHARD_BYTES, SINGLE
from delta_sync.dtypes import dtype
from delta_sync.errors import FormatError
from delta_sync.manifest import TensorState


class AnchorLayout:
    """Creates a checkpoint's files in ``folder``, headers written and tensors zero; ``files`` is name -> path."""

    def __init__(self, folder: Path, states: Mapping[str, TensorState], *, shard_bytes: int = SHARD_BYTES) -> None:
        if not states:
            raise FormatError("anchor", expected="at least one tensor", got="none")
        shards = _shards(states, shard_bytes)
        self.files: dict[str, Path] = {}
        self._states, self._places = states, dict[str, tuple[Path, int]]()
        for number, names in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self.files[name] = folder / name
            self._create(folder / name, names)
        if len(shards) > 1:
            self.files[INDEX] = folder / INDEX
            self._write_index(folder / INDEX)

    def tensor(self, name: str) -> npt.NDArray[np.unsignedinteger]:
        """A tensor's bits in its file, flat and writable: what is assigned to it is in the file once it is released."""
        path, offset = self._places[name]
        state = self._states[name]
        carrier, size = dtype(state.dtype).carrier, math.prod(state.shape)
        if size == 0:
            return np.empty(0, carrier)
        return np.memmap(path, carrier, "r+", offset, (size,))

    def _create(self, path: Path, names: list[str]) -> None:
        entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        begins: dict[str, int] = {}
        at = 0
        for name in names:
            state = self._states[name]
            begins[name] = at
            entries[name] = {"dtype": state.dtype, "shape": list(state.shape), "data_offsets": [at, at + _bytes(state)]}
            at += _bytes(state)
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        with path.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            size = 8 + len(text) + at
            file.truncate(size)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, size)  # OSError now, where there is no room, not SIGBUS later
        self._places |= {name: (path, 8 + len(text) + begin) for name, begin in begins.items()}

    def _write_index(self, path: Path) -> None:
        weight_map = {name: place.name for name, (place, _) in self._places.items()}
        total = sum(_bytes(state) for state in self._states.values())
        path.write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2) + "\n")


def _bytes(state: TensorState) -> int:
    return math.prod(state.shape) * dtype(state.dtype).itemsize


def _shards(states: Mapping[str, TensorState], shard_bytes: int) -> list[list[str]]:
    """Names by shard; wide element types first, so that every tensor is aligned to its own."""
    shards: list[list[str]] = []
    filled = 0
    for name in sorted(states, key=lambda name: -dtype(states[name].dtype).itemsize):
        size = _bytes(states[name])
        if not shards or filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(name)
        filled += size
    return shards
