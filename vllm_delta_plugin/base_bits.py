"""Old bits for context-coded deltas: what a chain starts from, live or an anchor, with the deltas so far applied."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.delta import apply
from delta_sync.dtypes import DType
from delta_sync.errors import IntegrityError, MappingError
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.regions import scatter_source

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.manifest import AnchorRecord

Array = npt.NDArray[Any]


class BaseBits:
    """Called with a tensor's name, dtype and shape: its flat carrier bits after ``folded``, a copy.

    ``check`` judges the tensor first. ``start`` gives the bits that the chain starts from, a fresh copy.
    """

    def __init__(
        self,
        start: Callable[[str], Array],
        folded: Mapping[str, Sequence[TensorDelta]],
        check: Callable[[TensorDelta], None],
    ) -> None:
        self._start, self._folded, self._check = start, folded, check

    def __call__(self, name: str, dtype: DType, shape: tuple[int, ...]) -> Array:
        """See the class; raises what ``check`` and ``start`` raise."""
        self._check(TensorDelta(name, dtype, shape, "ulp", np.empty(0, np.int64), np.empty(0, dtype.carrier)))
        bits = self._start(name)
        for delta in self._folded.get(name, ()):
            apply(delta, bits)
        return bits


def live_bits(weights: WeightMap, name: str) -> Array:
    """A whole tensor's live bits, flat; MappingError where this rank holds only a part of it."""
    owner = weights.aliases.get(name, name)
    info, regions = weights.tensors.get(owner), {region.key: region for region in weights.regions.get(owner, ())}
    size = int(np.prod(info.shape, dtype=np.int64)) if info else -1
    held = sum(region.numel for region in regions.values())
    if info is None or held != size:
        raise MappingError(
            f"context-coded delta of {name!r}", expected="all its elements on this rank", got=f"{held} of them",
            remedy="publish with codec='gap', or serve with one rank, without tensor parallelism",
        )  # fmt: skip
    flat = np.empty(size, info.dtype.carrier)
    for region in regions.values():
        live = weights.storages[region.storage]
        scatter_source(flat, region, live.read_box(region.shape, region.dst_offset, region.dst_strides))
    return flat


class AnchorBits:
    """An anchor's tensors, read at the first call: the whole model in host memory while a chain is decoded."""

    def __init__(self, ledger: Ledger, anchor: AnchorRecord, aliases: Mapping[str, str]) -> None:
        self._ledger, self._anchor, self._aliases = ledger, anchor, aliases
        self._bits: dict[str, Array] | None = None

    def __call__(self, name: str) -> Array:
        """A tensor's flat bits, a copy; IntegrityError if the anchor lacks it."""
        if self._bits is None:
            tensors = iter_anchor_tensors(self._ledger, self._anchor)
            self._bits = {found: np.array(bits).reshape(-1) for found, _, _, bits in tensors}
        bits = self._bits.get(name, self._bits.get(self._aliases.get(name, name)))
        if bits is None:
            raise IntegrityError(f"anchor of version {self._anchor.version}", expected=f"tensor {name!r}", got="none")
        return bits.copy()
