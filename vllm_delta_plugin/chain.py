"""Reading a chain of delta objects and folding it to one change per tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from delta_sync.breath import breathe
from delta_sync.context_file import Decoded, decode_against, decode_if_alone
from delta_sync.delta import fold
from delta_sync.delta_file import Unpacked, decode_delta
from delta_sync.dtypes import DType
from delta_sync.errors import ChainError, FormatError, MappingError
from delta_sync.fetch import fetch
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.base_bits import BaseBits, Start
from vllm_delta_plugin.staged import StageTooLargeError

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.plan import Step

Folded = dict[str, list[TensorDelta]]


class Early(Protocol):
    """What stages objects one by one while the next are fetched, as long as each has tensors of its own."""

    def read(self, data: bytes) -> Unpacked | Decoded | bytes:
        """What the thread that fetched an object makes of it; bytes, if that needs a base."""

    def add_unpacked(self, object_: Unpacked) -> bool:
        """Stage an object that is not decoded; False if it must be."""

    def add(self, part: Folded) -> bool:
        """Stage an object's deltas; False if all objects must be folded."""


def fold_chain(
    ledger: Ledger,
    steps: Sequence[Step],
    check: Callable[[str, DType, tuple[int, ...]], None],
    limit: int,
    reading: Callable[[str | None], None],
    start: Start,
    early: Early | None = None,
) -> Folded:
    """Read, verify, decode and fold every object of ``steps`` in order, fetching and decoding ahead.

    ``check`` judges each tensor; ``reading`` is told which object is being worked on; ``start`` gives a copy of a
    tensor's bits before the chain, for objects that decode only against them. As long as ``early`` stages objects by
    themselves nothing is folded, and if it could stage all of them the result is empty. Holds one decoded object, the
    folded result, what ``fetch`` holds, and while a context-coded object is decoded the tensors it changes;
    StageTooLargeError if the result exceeds ``limit`` bytes.
    """
    read = early.read if early is not None else decode_if_alone
    refs = [ref for step in steps for ref in step.objects]
    with closing(fetch(ledger, refs, read)) as arriving:  # on an error nothing else would end its threads
        return _fold(arriving, steps, check, limit, reading, start, early)


def _fold(
    arriving: Iterator[Unpacked | Decoded | bytes],
    steps: Sequence[Step],
    check: Callable[[str, DType, tuple[int, ...]], None],
    limit: int,
    reading: Callable[[str | None], None],
    start: Start,
    early: Early | None,
) -> Folded:
    folded: Folded = {}
    staged: list[bytes | memoryview | Folded] = []  # early; to be folded after all, should a later one need that
    for step in steps:
        base = BaseBits(start, dict(folded), check)  # a version's objects all change the bits of the version before
        for ref in step.objects:
            reading(ref.key)
            object_ = next(arriving)
            if isinstance(object_, bytes):
                object_ = decode_against(object_, base)
            header = object_.header if isinstance(object_, Unpacked) else object_[0]
            named = (header.run, header.version, header.base_version)
            if named != (step.run, step.version, step.base_version):
                raise FormatError(
                    f"object {ref.key}",
                    expected=f"run {step.run}, version {step.version} on {step.base_version}",
                    got=f"run {header.run}, version {header.version} on {header.base_version}",
                )
            for name, dtype, shape in _tensors(object_):
                check(name, dtype, shape)
                breathe()
            if isinstance(object_, Unpacked):
                if early is not None and early.add_unpacked(object_):
                    staged.append(object_.data)
                    continue
                object_ = header, object_.deltas()
            part = _part(object_[1])
            staged.append(part)
            if early is not None and early.add(part):
                continue
            for each in staged:
                for more in (each if isinstance(each, dict) else _part(decode_delta(each)[1])).values():
                    _add(folded, more)
            staged.clear()
            _check_size(folded, limit)
    reading(None)
    return folded


def _tensors(object_: Unpacked | Decoded) -> list[tuple[str, DType, tuple[int, ...]]]:
    """What an object says of the tensors it changes."""
    if isinstance(object_, Unpacked):
        return [(e.name, group.coded.dtype, e.shape) for group in object_.groups for e in group.entries]
    return [(delta.name, delta.dtype, delta.shape) for delta in object_[1]]


def _part(deltas: Sequence[TensorDelta]) -> Folded:
    """One object's deltas by tensor."""
    part: Folded = {}
    for delta in deltas:
        _add(part, [delta])
    return part


def _add(folded: Folded, more: Sequence[TensorDelta]) -> None:
    before = folded.get(more[0].name)
    folded[more[0].name] = fold([*before, *more]) if before else list(more)


def _check_size(folded: Folded, limit: int) -> None:
    size = sum(d.positions.nbytes + d.values.nbytes for deltas in folded.values() for d in deltas)
    if size > limit:
        raise StageTooLargeError("folded chain", expected=f"at most {limit} bytes", got=f"{size}")


def drop_aliases(folded: Folded, aliases: Mapping[str, str]) -> None:
    """Remove deltas of tied names; MappingError unless each changes exactly what its original's delta changes."""
    for alias in [name for name in folded if name in aliases]:
        original = aliases[alias]
        if not _equal(folded.pop(alias), folded.get(original, [])):
            raise MappingError(
                f"tensor {alias!r}",
                expected=f"the same change as {original!r}, whose memory it shares",
                got="another change",
                remedy="tie the weights in training too, or serve with tie_word_embeddings off",
            )


def undone(folded: Folded) -> Folded:
    """The changes that lead back; ChainError if one is by absolute bits, which do not say what was there before."""
    for name, deltas in folded.items():
        if any(delta.encoding == "raw" for delta in deltas):
            raise ChainError(
                f"change of tensor {name!r}",
                expected="steps, which can be undone",
                got="absolute bits",
                remedy="attach an anchor to the older version",
            )
    return {n: [replace(d, values=np.negative(d.values)) for d in deltas] for n, deltas in folded.items()}


def _equal(one: Sequence[TensorDelta], other: Sequence[TensorDelta]) -> bool:
    return len(one) == len(other) and all(
        a.encoding == b.encoding and np.array_equal(a.positions, b.positions) and np.array_equal(a.values, b.values)
        for a, b in zip(one, other, strict=True)
    )
