"""What one version would change on this rank, ready to be swapped in, and the sums that prove it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.delta import new_bits
from delta_sync.delta_file import Unpacked
from delta_sync.digest import digest_change
from delta_sync.dtypes import DType
from delta_sync.errors import DeltaSyncError, MappingError
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_digest import tensor_key
from vllm_delta_plugin.live_storage import LiveStorage
from vllm_delta_plugin.regions import Region, map_positions
from vllm_delta_plugin.shadow import ShadowStorage
from vllm_delta_plugin.transfer import to_host

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


class StageTooLargeError(DeltaSyncError):
    """Staging would need more memory than allowed: load the version densely instead."""

    action = "re-anchor"


@dataclass(frozen=True)
class Update:
    """Absolute new ``bits`` (carrier ``[n]``) for distinct live elements ``index`` (int64 ``[n]``) of a storage."""

    storage: LiveStorage
    index: Index
    bits: Array


@dataclass
class _Pending:
    delta: TensorDelta
    region: Region
    which: Index
    dst: Index


@dataclass
class StageBuilder:
    """Collects changes, reads the bits they replace, and sums up both; ``limit`` is in bytes of staged data."""

    weights: WeightMap
    limit: int
    parts: dict[str, int] = field(default_factory=dict)
    changed: int = 0
    _index: dict[int, list[Index]] = field(default_factory=dict)
    _bits: dict[int, list[Array]] = field(default_factory=dict)
    _bytes: int = 0
    _counted: dict[str, Region] = field(default_factory=dict)  # of several live copies of a region, the one summed up

    def __post_init__(self) -> None:
        for region in (region for regions in self.weights.regions.values() for region in regions):
            self._counted.setdefault(region.key, region)

    def add_deltas(self, deltas: Mapping[str, Sequence[TensorDelta]]) -> None:
        """Stage every tensor's folded deltas; MappingError if one does not fit, StageTooLargeError."""
        pending: dict[int, list[_Pending]] = {}
        for name, folded in deltas.items():
            for region in self.weights.regions.get(name, ()):
                for delta in folded:
                    which, dst = map_positions(region, delta.positions)
                    pending.setdefault(region.storage, []).append(_Pending(delta, region, which, dst))
        for storage, items in pending.items():
            self._add_storage(storage, items)

    def add_unpacked(self, object_: Unpacked) -> bool:
        """Stage an object that the host has not decoded, if that can be done here; FormatError, else as add_deltas."""
        return False

    def finish(self) -> None:
        """Wait for what was staged, so that ``parts`` and ``changed`` are complete; FormatError of add_unpacked."""

    def _add_storage(self, storage: int, items: Sequence[_Pending]) -> None:
        live = self.weights.storages[storage]
        old = live.read(np.concatenate([item.dst for item in items]))
        at = 0
        for item in items:
            mine = old[at : at + item.dst.size]
            at += item.dst.size
            d = item.delta
            positions, values = d.positions[item.which], d.values[item.which]
            part = TensorDelta(d.name, d.dtype, d.shape, d.encoding, positions, values)
            self.add_values(item.region, positions, item.dst, mine, new_bits(part, mine))

    def add_values(self, region: Region, positions: Index, dst: Index, old: Array, new: Array) -> None:
        """Stage new bits for a region's elements: positions, live elements, old and new bits, all ``[n]``."""
        differs = old != new
        if not differs.all():
            positions, dst, old, new = positions[differs], dst[differs], old[differs], new[differs]
        if not positions.size:
            return
        self._grow(dst.nbytes + new.nbytes)
        change = digest_change(positions, old, new, tensor_key(region.tensor))
        self._note(region, change, int(positions.size))
        self._index.setdefault(region.storage, []).append(dst)
        self._bits.setdefault(region.storage, []).append(new)

    def _note(self, region: Region, change: int, count: int) -> None:
        if region is self._counted[region.key] or region == self._counted[region.key]:
            self.parts[region.key] = (self.parts.get(region.key, 0) + change) % 2**64
            self.changed += count

    def _grow(self, size: int) -> None:
        self._bytes += size
        if self._bytes > self.limit:
            raise StageTooLargeError(
                "staged changes",
                expected=f"at most {self.limit} bytes",
                got="more",
                remedy="load densely from an anchor",
            )

    def changes(self, storages: Iterable[int]) -> dict[int, tuple[Index, Array]]:
        """What is staged on the host for some storages, by number: distinct live elements and the bits they get."""
        wanted = sorted(set(storages) & set(self._index))
        return {s: (np.concatenate(self._index[s]), np.concatenate(self._bits[s])) for s in wanted}

    def changes_any(self, storage: int) -> bool:
        """Whether anything of a storage is staged on the host."""
        return storage in self._index

    def add_made(self, storage: int, index: torch.Tensor, bits: torch.Tensor) -> None:
        """Stage bits (signed ``[n]``) that follow from what is staged for elements ``index`` (int64 ``[n]``)."""
        self._grow(index.nbytes + bits.nbytes)
        carrier = self.weights.storages[storage].dtype.carrier
        self._index.setdefault(storage, []).append(to_host(index))
        self._bits.setdefault(storage, []).append(to_host(bits).view(carrier))

    def take_shadowed(self) -> list[Update]:
        """Take out what is staged for shadows, which a commit does not swap."""
        shadowed = [s for s in self._index if isinstance(self.weights.storages[s], ShadowStorage)]
        found = self._updates(self.changes(shadowed))
        for storage in shadowed:
            del self._index[storage], self._bits[storage]
        return found

    def updates(self) -> list[Update]:
        """The staged changes, one update a storage."""
        return self._updates(self.changes(self._index))

    def _updates(self, changes: Mapping[int, tuple[Index, Array]]) -> list[Update]:
        return [Update(self.weights.storages[s], index, bits) for s, (index, bits) in changes.items()]


def check_tensor(weights: WeightMap, name: str, dtype: DType, shape: tuple[int, ...], *, only_rank: bool) -> None:
    """MappingError unless a published tensor is served in its element type and shape, here or on another rank."""
    what, remedy = f"tensor {name!r}", "serve the model that is trained, with the dtype that is published"
    if name not in weights.known and name not in weights.aliases:
        raise MappingError(what, expected="a tensor of the served checkpoint", got="an unknown name", remedy=remedy)
    info = weights.tensors.get(weights.aliases.get(name, name))
    if info is None:
        if only_rank:
            raise MappingError(
                what, expected="a tensor the model loads", got="one its loader ignores", remedy="do not publish it"
            )
        return
    if (info.dtype, info.shape) != (dtype, shape):
        raise MappingError(
            what,
            expected=f"{info.dtype.name} {list(info.shape)} as served",
            got=f"{dtype.name} {list(shape)} as published",
            remedy=remedy,
        )
