"""Parameters whose elements vLLM puts elsewhere after loading: the map follows them there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from delta_sync.errors import MappingError
from vllm_delta_plugin.affine import Step, affine
from vllm_delta_plugin.compat.process_seam import Unprocessed
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_storage import LiveStorage, live_storage
from vllm_delta_plugin.log import logger
from vllm_delta_plugin.probe import Form, Layout, form, probe
from vllm_delta_plugin.regions import Region, locate, make_region, split

_MAX_PIECES = 64  # of a region: with more, boxes would be no smaller a map than the numbers of elements
_MAX_DIMS = 4  # of a box, as the GPU's kernels take them
_AT_ONCE = 1 << 24  # elements of a region that are followed at once
Modules = Mapping[str, Unprocessed]
Piece = tuple[str, int, int, list[Step]]  # parameter that is served, first position, first element of it, steps


def follow(
    model: torch.nn.Module, weights: WeightMap, modules: Modules, sums: Mapping[str, int], replaced: Set[int]
) -> None:
    """Map tensors to where the elements of ``replaced`` storages, and of those changed in place, are served.

    ``modules``: those that vLLM processes one by one. ``sums``: each tensor's digest as it was loaded, which proves the
    map: a tensor that is not served with it becomes a problem.
    """
    served = _Served(dict(model.named_modules()), modules)
    todo, done, why = set(replaced), set[int](), "is replaced after loading"
    while not weights.problems:
        if todo:
            _map(weights, served, served.with_alike(weights.storages, todo) - done, why)
            done = served.with_alike(weights.storages, todo | done)
        wrong = {} if weights.problems else _not_as_loaded(weights, sums)
        if not wrong:
            break
        todo = {region.storage for regions in wrong.values() for region in regions} - done
        why = "is transformed in place after loading"
        if not todo:
            weights.problems |= dict.fromkeys(wrong, "it is transformed after loading, not only put elsewhere")
    if done and not weights.problems:
        weights.rearranged = {weights.storages[number].owner for number in done}
        logger.info("delta sync: the elements of %d parameters are followed to where vLLM puts them", len(done))


def _not_as_loaded(weights: WeightMap, sums: Mapping[str, int]) -> dict[str, list[Region]]:
    return {name: weights.regions[name] for name, value in weights.sums().items() if value != sums[name]}


def _map(weights: WeightMap, served: _Served, storages: Set[int], why: str) -> None:
    new: dict[str, list[tuple[LiveStorage, Region]]] = {}
    for name, regions in weights.regions.items():
        if not any(region.storage in storages for region in regions):
            continue
        try:
            for region in regions:
                storage = weights.storages[region.storage]
                pieces = served.pieces(storage, region) if region.storage in storages else [(storage, region)]
                new.setdefault(name, []).extend(pieces)
        except MappingError as error:
            weights.problems.setdefault(name, f"parameter {storage.owner!r} {why} ({error})")
    if weights.problems:
        return
    numbers = {storage.owner: number for number, storage in enumerate(weights.storages)}
    for name, followed in new.items():
        for storage, _ in followed:
            if storage.owner not in numbers:
                numbers[storage.owner] = len(weights.storages)
                weights.storages.append(storage)
            weights.storages[numbers[storage.owner]] = storage
        weights.loaded.setdefault(name, weights.regions[name])
        weights.regions[name] = [replace(region, storage=numbers[storage.owner]) for storage, region in followed]
    owners: dict[int, str] = {}
    for number, storage in enumerate(weights.storages):
        if owners.setdefault(storage.bits.data_ptr(), storage.owner) != storage.owner:
            for name in weights.tensors_in(number):
                weights.problems.setdefault(name, f"parameter {storage.owner!r} {why}, into another one's memory")


@dataclass
class _Served:
    """Where modules' elements are served. Layouts are found once for all modules that are processed alike."""

    live: Mapping[str, torch.nn.Module]
    modules: Modules
    _layouts: dict[object, Layout] = field(default_factory=dict)
    _pieces: dict[object, list[Piece]] = field(default_factory=dict)
    _storages: dict[str, LiveStorage] = field(default_factory=dict)

    def with_alike(self, storages: Sequence[LiveStorage], numbers: Set[int]) -> set[int]:
        """These storages and all of the modules that are processed as theirs are."""
        kinds = [self._kind(storage) for storage in storages]
        wanted = {kinds[number] for number in numbers} - {None}
        return {number for number, kind in enumerate(kinds) if kind in wanted} | set(numbers)

    def pieces(self, storage: LiveStorage, region: Region) -> list[tuple[LiveStorage, Region]]:
        """A loaded region where it is served; MappingError if it is not there element by element."""
        path, _, parameter = storage.owner.rpartition(".")
        width, kind = storage.dtype.itemsize, self._kind(storage)
        if kind is None or parameter not in self.modules[path].parameters:
            raise MappingError("it", expected="processed with its module alone", got="processed otherwise")
        if (width, kind) not in self._layouts:
            self._layouts[width, kind] = probe(self.modules[path], width, storage.bits.device)
        layout = self._layouts[width, kind]
        out: list[tuple[LiveStorage, Region]] = []
        for part in split(region, _AT_ONCE):
            key = (width, kind, parameter, part.shape, part.src_strides, part.dst_offset, part.dst_strides)
            if key not in self._pieces:
                self._pieces[key] = list(_pieces(layout, parameter, replace(part, src_offset=0)))
            for name, position, place, steps in self._pieces[key]:
                served = self._storage(path, name, layout.served[name].form)
                out += [(served, box) for box in _boxes(part.tensor, part.src_offset + position, place, steps)]
        return out

    def _kind(self, storage: LiveStorage) -> object:
        module = self.modules.get(storage.owner.rpartition(".")[0])
        return module and module.signature

    def _storage(self, path: str, name: str, made: Form) -> LiveStorage:
        owner = f"{path}.{name}"
        if owner not in self._storages:
            live = self.live[path]._parameters.get(name)
            if live is None or form(live) != made:
                got = "nothing" if live is None else "another layout"
                raise MappingError(f"parameter {owner!r}", expected="as its module's processing makes it", got=got)
            self._storages[owner] = live_storage(owner, live)
        return self._storages[owner]


def _pieces(layout: Layout, parameter: str, region: Region) -> Iterator[Piece]:
    positions, elements = locate(region, np.arange(region.numel))
    places = layout.where[elements + layout.first[parameter]].astype(np.int64)
    if places.min(initial=0) < 0:
        raise MappingError("its elements", expected="all of them served", got="some of them left out")
    begun = set[int]()
    for name, served in layout.served.items():
        here = (places >= served.begin) & (places < served.end)
        if served.begin in begun or not here.any():
            continue
        begun.add(served.begin)  # another parameter may be a view of the same memory
        found = affine(positions[here], places[here] - served.begin, _MAX_PIECES)
        if found is None:
            raise MappingError("its elements", expected=f"in {_MAX_PIECES} blocks at most", got="in more")
        for position, place, steps in found:
            yield name, position, place, steps


def _boxes(tensor: str, position: int, place: int, steps: list[Step]) -> Iterator[Region]:
    """The box, cut along its smallest dimensions into some of few enough."""
    sizes, strides, live = zip(*steps, strict=True) if steps else ((), (), ())
    whole = make_region(tensor, -1, sizes, position, strides, place, live)
    if len(whole.shape) <= _MAX_DIMS:
        yield whole
        return
    smallest = min(range(len(steps)), key=lambda number: steps[number][0])
    size, stride, to = steps[smallest]
    for k in range(size):
        yield from _boxes(tensor, position + k * stride, place + k * to, steps[:smallest] + steps[smallest + 1 :])
