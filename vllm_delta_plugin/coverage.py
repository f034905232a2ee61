"""From a recorded load to a map that deltas can be written through, or a refusal that names tensor and reason."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch

from delta_sync.dtypes import DType
from delta_sync.errors import IntegrityError, MappingError
from vllm_delta_plugin.live_digest import Digests
from vllm_delta_plugin.live_storage import LiveStorage, live_storage
from vllm_delta_plugin.regions import Region, by_tensor, make_region, overlapping
from vllm_delta_plugin.trace import NEEDS_VALUES, Copy, Trace

if TYPE_CHECKING:
    from vllm_delta_plugin.requantised import Requantised

Place = tuple[object, ...]  # storage, address, shape, strides, dtype, device
_LEFT_OUT = "vLLM's loader leaves it out, though it reads the rest of that module"
_REMEDIES = {  # by how the reason begins
    NEEDS_VALUES: "serve without --enable-expert-parallel where that is set, else with a vLLM whose loader only copies",
    _LEFT_OUT: "serve with a vLLM whose loader reads that tensor, or train a model without it",
}
_OTHER_REMEDY = "serve an unquantised dense or MoE model; on a GPU try --moe-backend triton"


@dataclass(frozen=True)
class TensorInfo:
    """A checkpoint tensor as it is served: element type of the live memory, shape of the checkpoint."""

    dtype: DType
    shape: tuple[int, ...]


@dataclass
class WeightMap:
    """Where every checkpoint tensor's elements live on this rank.

    ignored: checkpoint tensors the loader never read here. aliases: tensors whose elements another tensor owns.
    problems: tensor (or parameter) -> why deltas cannot be written into it; empty if the model is supported.
    """

    storages: list[LiveStorage] = field(default_factory=list)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    regions: dict[str, list[Region]] = field(default_factory=dict)
    known: frozenset[str] = frozenset()
    ignored: list[str] = field(default_factory=list)
    aliases: dict[str, str] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)
    places: dict[str, Place] = field(default_factory=dict)  # each parameter's place once loading was over
    loose: frozenset[str] = frozenset()  # tensors that modules kept outside parameters before loading was over
    loaded: dict[str, list[Region]] = field(default_factory=dict)  # of tensors that moved: as they were loaded
    rearranged: set[str] = field(default_factory=set)  # parameters whose elements are served elsewhere than loaded
    requantised: Requantised | None = None  # what is served as vLLM's quantisation makes it; None: nothing is

    def staged_on_host(self, region: Region) -> bool:
        """Whether what is served is made of the region's elements: the host must know its changes."""
        return self.requantised is not None and region.storage in self.requantised.staged_on_host

    def digests(self) -> dict[str, int]:
        """Scan live memory: region key -> digest; IntegrityError if two live copies of one region differ."""
        regions = [region for regions in self.regions.values() for region in regions]
        digests = Digests(self.storages, regions)
        for _ in digests:
            pass
        out: dict[str, int] = {}
        for region, value in zip(regions, digests.result, strict=True):
            if out.setdefault(region.key, value) != value:
                first = f"{out[region.key]:016x}"
                raise IntegrityError(
                    f"copies of region {region.key!r} on one rank", expected=first, got=f"{value:016x}"
                )
        return out

    def sums(self) -> dict[str, int]:
        """Each tensor's digest on this rank, the same however its elements are cut into regions; scans live memory."""
        digests = self.digests()
        return {name: sum(digests[r.key] for r in regions) % 2**64 for name, regions in self.regions.items()}

    def tensors_in(self, storage: int) -> list[str]:
        """The tensors of which elements lie in a storage."""
        return [name for name, regions in self.regions.items() if any(r.storage == storage for r in regions)]

    def let_go(self) -> None:
        """Keep no memory alive that vLLM may replace: a second copy of the weights might not fit beside the first."""
        self.storages = [replace(s, bits=s.bits.new_empty(0)) for s in self.storages]

    def check(self) -> None:
        """MappingError naming the first tensor that cannot be served, why, and how many more there are."""
        if not self.problems:
            return
        name, reason = next(iter(self.problems.items()))
        raise MappingError(
            f"tensor {name!r} (one of {len(self.problems)} that cannot take deltas)",
            expected="weights that live as the checkpoint stores them",
            got=reason,
            remedy=next((r for begin, r in _REMEDIES.items() if reason.startswith(begin)), _OTHER_REMEDY),
        )


def map_weights(model: torch.nn.Module, trace: Trace, shapes: Mapping[str, tuple[int, ...]]) -> WeightMap:
    """Turn recorded copies into regions of live storages; what does not fit becomes a problem."""
    result = WeightMap(known=frozenset(shapes), ignored=list(trace.ignored), problems=dict(trace.problems))
    owners = _owners(model)
    numbers: dict[int, int] = {}
    for copy in trace.copies:
        try:
            if copy.storage not in numbers:
                result.storages.append(live_storage(*owners[copy.storage]))
                numbers[copy.storage] = len(result.storages) - 1
            _add(result, copy, numbers[copy.storage], shapes[copy.source])
        except MappingError as error:
            result.problems.setdefault(copy.source, str(error))
    _check_overlaps(result)
    _check_left_out(result, trace.blank)
    return result


def _owners(model: torch.nn.Module) -> dict[int, tuple[str, torch.Tensor]]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {tensor.untyped_storage()._cdata: (name, tensor) for name, tensor in reversed(named)}


def _add(result: WeightMap, copy: Copy, storage: int, shape: tuple[int, ...]) -> None:
    region = make_region(
        copy.source, storage, copy.shape, copy.src_offset, copy.src_strides, copy.dst_offset, copy.dst_strides
    )
    info = TensorInfo(result.storages[storage].dtype, shape)
    if result.tensors.setdefault(copy.source, info) != info:
        raise MappingError(f"tensor {copy.source!r}", expected="one element type", got="several")
    regions = result.regions.setdefault(copy.source, [])
    if region not in regions:  # a loader may write the same elements twice
        regions.append(region)


def _check_overlaps(result: WeightMap) -> None:
    by_storage: dict[int, list[Region]] = {}
    for name, regions in result.regions.items():
        if overlapping((r.src_offset, r.src_strides, r.shape) for r in regions):
            _check_copies(result, name, regions)
        for region in regions:
            by_storage.setdefault(region.storage, []).append(region)
    for storage, regions in by_storage.items():
        if overlapping((r.dst_offset, r.dst_strides, r.shape) for r in regions):
            for name in by_tensor(regions):
                result.problems.setdefault(name, f"its elements in {result.storages[storage].owner} are loaded twice")


def _check_left_out(result: WeightMap, blank: Set[str]) -> None:
    """A module loaded only in part is not the one that is trained; one left out as a whole may be (a draft, say)."""
    loaded = {_module(name) for name in result.regions} - {""}
    for name in result.ignored:
        if _module(name) in loaded and name not in blank:
            result.problems.setdefault(name, _LEFT_OUT)


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def _check_copies(result: WeightMap, name: str, regions: list[Region]) -> None:
    """Several live copies of the same elements are fine only if the copies are of whole, equal regions."""
    distinct = {region.key: region for region in regions}
    if overlapping((r.src_offset, r.src_strides, r.shape) for r in distinct.values()):
        result.problems.setdefault(name, "it is read in partly overlapping pieces")


def add_tied_names(model: torch.nn.Module, weights: WeightMap) -> None:
    """Name as aliases the tensors a tied checkpoint may repeat: parameters that share another one's storage."""
    owners = {weights.storages[i].bits.untyped_storage().data_ptr(): i for i in range(len(weights.storages))}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        storage = owners.get(parameter.untyped_storage().data_ptr())
        if storage is None or name in weights.tensors or name in weights.aliases:
            continue
        candidates = weights.tensors_in(storage)
        if len(candidates) == 1 and name != weights.storages[storage].owner:
            weights.aliases[name] = candidates[0]
