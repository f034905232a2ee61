"""Old bits for context-coded deltas: what a chain starts from, live or an anchor, with the deltas so far applied."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.context_file import PartOf
from delta_sync.delta import apply
from delta_sync.dtypes import DType
from delta_sync.errors import IntegrityError
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.regions import holds, scatter_source

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.manifest import AnchorRecord

Array = npt.NDArray[Any]
Start = Callable[[str, DType, tuple[int, ...]], Array | PartOf]


class BaseBits:
    """Called with a tensor's name, dtype and shape: its flat carrier bits after ``folded``, a copy, or a part of them.

    ``check`` judges the tensor first. ``start`` gives the bits that the chain starts from, a fresh copy.
    """

    def __init__(
        self,
        start: Start,
        folded: Mapping[str, Sequence[TensorDelta]],
        check: Callable[[str, DType, tuple[int, ...]], None],
    ) -> None:
        self._start, self._folded, self._check = start, folded, check

    def __call__(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array | PartOf:
        """See the class; raises what ``check`` and ``start`` raise."""
        self._check(name, dtype, shape)
        base = self._start(name, dtype, shape)
        for delta in self._folded.get(name, ()):
            apply(delta, base.bits if isinstance(base, PartOf) else base)
        return base


def live_bits(weights: WeightMap, name: str, dtype: DType, shape: tuple[int, ...]) -> Array | PartOf:
    """A tensor's live bits, flat: all of them, or the part that this rank holds, be it none."""
    owner = weights.aliases.get(name, name)
    regions = {region.key: region for region in weights.regions.get(owner, ())}
    bits = np.empty(math.prod(shape), dtype.carrier)  # what is never written takes no memory
    for region in regions.values():
        live = weights.storages[region.storage]
        scatter_source(bits, region, live.read_box(region.shape, region.dst_offset, region.dst_strides))
    held = sum(region.numel for region in regions.values())
    if held == bits.size:
        return bits
    columns = shape[-1] if len(shape) > 1 else 1
    parts = weights.loaded.get(owner) or regions.values()
    return PartOf(bits, held, lambda tile: any(holds(region, columns, tile) for region in parts))


class AnchorBits:
    """An anchor's tensors, read at the first call: the whole model in host memory while a chain is decoded.

    ``job`` is told of the anchor's objects while they are read, so that none of their errors is a delta's.
    """

    def __init__(self, job: Job[Any], ledger: Ledger, anchor: AnchorRecord, aliases: Mapping[str, str]) -> None:
        self._job, self._ledger, self._anchor, self._aliases = job, ledger, anchor, aliases
        self._bits: dict[str, Array] | None = None

    def __call__(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
        """A tensor's flat bits, a copy; IntegrityError if the anchor lacks it."""
        if self._bits is None:
            delta = self._job.object
            tensors = iter_anchor_tensors(self._ledger, self._anchor, reading=self._job.reading)
            self._bits = {found: np.array(bits).reshape(-1) for found, _, _, bits in tensors}
            self._job.reading(delta)
        bits = self._bits.get(name, self._bits.get(self._aliases.get(name, name)))
        if bits is None:
            raise IntegrityError(f"anchor of version {self._anchor.version}", expected=f"tensor {name!r}", got="none")
        return bits.copy()
