"""Proof before commit: the ranks' sums over what would change must lead to the manifest's digests exactly."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from delta_sync.breath import breathe
from delta_sync.cover import check_cover
from delta_sync.digest import state_digest
from delta_sync.errors import IntegrityError, MappingError
from delta_sync.manifest import TensorState

MASK = 2**64 - 1
Sums = Mapping[str, int]  # region key -> sum modulo 2**64


@dataclass(frozen=True)
class Region:
    """A part of one tensor: row-major flat positions ``offset + sum(index * strides)`` over ``shape``."""

    tensor: str
    offset: int
    strides: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def parse(cls, key: str) -> Region:
        """From ``tensor|offset|strides|shape``; MappingError if it is not that."""
        try:
            tensor, offset, strides, shape = key.rsplit("|", 3)
            return cls(tensor, int(offset), _integers(strides), _integers(shape))
        except (ValueError, SyntaxError, TypeError):
            raise MappingError("region key", expected="tensor|offset|strides|shape", got=repr(key)) from None


class Layout:
    """Which rank holds which region of which tensor; built once, when the workers are attached.

    Raises MappingError if a tensor's regions leave a gap or overlap, or if ranks disagree about a tensor.
    """

    def __init__(self, tensors: Mapping[str, tuple[str, tuple[int, ...]]], ranks: Sequence[Iterable[str]]) -> None:
        self.tensors = dict(tensors)
        self.keys = [frozenset(keys) for keys in ranks]
        self.regions = {key: Region.parse(key) for key in frozenset().union(*self.keys)}
        self._check()

    def combine(self, ranks: Sequence[Sums]) -> dict[str, int]:
        """Every tensor's digest from every rank's region sums; regions held by several ranks count once.

        IntegrityError naming region and ranks if copies disagree, or if a rank does not report what it holds.
        """
        for rank, sums in enumerate(ranks):
            if unknown := set(sums) ^ self.keys[rank]:
                raise IntegrityError(f"regions of rank {rank}", expected="those it attached with", got=sorted(unknown))
        digests = dict.fromkeys(self.tensors, 0)
        for key, region in self.regions.items():
            breathe()
            digests[region.tensor] = (digests[region.tensor] + self._agreed(key, ranks)) & MASK
        return digests

    def after(self, bases: Sequence[Sums], changes: Sequence[Sums]) -> list[dict[str, int]]:
        """Every rank's region sums after its changes; IntegrityError for a change to a region it does not hold."""
        result = []
        for rank, (base, change) in enumerate(zip(bases, changes, strict=True)):
            if unknown := set(change) - self.keys[rank]:
                raise IntegrityError(f"changes of rank {rank}", expected="regions it holds", got=sorted(unknown))
            sums = dict(base)
            for key, value in change.items():
                breathe()
                sums[key] = (sums[key] + int(value)) & MASK
            result.append(sums)
        return result

    def states(self, digests: Mapping[str, int]) -> dict[str, TensorState]:
        """Every tensor's state, given every tensor's digest."""
        return {n: TensorState(dtype, shape, digests[n]) for n, (dtype, shape) in self.tensors.items()}

    def _agreed(self, key: str, ranks: Sequence[Sums]) -> int:
        values = {rank: int(ranks[rank][key]) & MASK for rank, keys in enumerate(self.keys) if key in keys}
        if len(set(values.values())) != 1:
            raise IntegrityError(
                f"copies of region {key!r}",
                expected="the same sum on every rank that holds it",
                got=values,
                remedy="an anchor makes the ranks equal again",
            )
        return next(iter(values.values()))

    def _check(self) -> None:
        by_tensor: dict[str, list[Region]] = {name: [] for name in self.tensors}
        for region in self.regions.values():
            if region.tensor not in by_tensor:
                raise MappingError(f"tensor {region.tensor!r}", expected="dtype and shape", got="a region only")
            by_tensor[region.tensor].append(region)
        for name, regions in by_tensor.items():
            check_cover(name, self.tensors[name][1], regions)


@dataclass(frozen=True)
class Proven:
    """What the ranks hold: each rank's region sums, every tensor's digest, and the digest of the whole state."""

    sums: Sequence[Sums]
    digests: Mapping[str, int]
    state: str

    @classmethod
    def of(cls, layout: Layout, sums: Sequence[Sums]) -> Proven:
        """Combine the ranks' sums; IntegrityError if their copies disagree."""
        digests = layout.combine(sums)
        return cls(sums, digests, state_digest(layout.states(digests)))


def prove(
    layout: Layout, bases: Sequence[Sums], changes: Sequence[Sums], wanted: Mapping[str, TensorState], state: str
) -> Proven:
    """What the ranks will hold after the change; IntegrityError unless that is exactly what the manifest says.

    bases: each rank's region sums of what is live. changes: each rank's sums over what it would change.
    wanted: every tensor the plan touches, at the target. state: the target's digest over all tensors.
    """
    check_names(layout, wanted)
    after = Proven.of(layout, layout.after(bases, changes))
    for name, target in wanted.items():
        if after.digests[name] != target.digest:
            raise IntegrityError(
                f"staged tensor {name!r}",
                expected=f"digest {target.digest:016x}",
                got=f"{after.digests[name]:016x}",
                remedy="attach an anchor: this delta does not lead from the live bits to the published ones",
            )
    if after.state != state:
        raise IntegrityError(
            "staged state",
            expected=f"digest {state}",
            got=after.state,
            remedy="attach an anchor, or serve the trainer's model",
        )
    return after


def check_names(layout: Layout, wanted: Mapping[str, TensorState]) -> None:
    """MappingError unless every wanted tensor is served with the same dtype and shape."""
    for name, target in wanted.items():
        served = layout.tensors.get(name)
        if served != (target.dtype, tuple(target.shape)):
            raise MappingError(
                f"tensor {name!r}",
                expected=f"{target.dtype} {tuple(target.shape)} as published",
                got="not in the served model" if served is None else f"{served[0]} {served[1]}",
                remedy="serve the model that is trained, in the dtype that is published",
            )


def _integers(text: str) -> tuple[int, ...]:
    value = ast.literal_eval(text)
    return tuple(int(v) for v in value)
