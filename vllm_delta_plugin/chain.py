"""Reading a chain of delta objects and folding it to one change per tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from delta_sync.context_file import decode_against, decode_if_alone
from delta_sync.delta import fold
from delta_sync.errors import ChainError, FormatError, MappingError
from delta_sync.fetch import fetch
from delta_sync.tensor_delta import TensorDelta
from vllm_delta_plugin.base_bits import BaseBits, Start
from vllm_delta_plugin.staged import StageTooLargeError

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.plan import Step

Folded = dict[str, list[TensorDelta]]


def fold_chain(
    ledger: Ledger,
    steps: Sequence[Step],
    check: Callable[[TensorDelta], None],
    limit: int,
    reading: Callable[[str | None], None],
    start: Start,
    decoded: Callable[[Folded, Folded], None] = lambda part, before: None,
) -> Folded:
    """Read, verify, decode and fold every object of ``steps`` in order, fetching and decoding ahead.

    ``check`` judges each tensor's delta; ``reading`` is told which object is being worked on; ``start`` gives a copy of
    a tensor's bits before the chain, for objects that decode only against them; ``decoded`` is told each object's
    deltas and what the objects before it came to. Holds one decoded object, the folded result, what ``fetch`` holds,
    and while a context-coded object is decoded the tensors it changes; StageTooLargeError if the result exceeds
    ``limit`` bytes.
    """
    folded: Folded = {}
    arriving = fetch(ledger, [ref for step in steps for ref in step.objects], decode_if_alone)
    for step in steps:
        base = BaseBits(start, dict(folded), check)  # a version's objects all change the bits of the version before
        for ref in step.objects:
            reading(ref.key)
            object_ = next(arriving)
            header, deltas = decode_against(object_, base) if isinstance(object_, bytes) else object_
            named = (header.run, header.version, header.base_version)
            if named != (step.run, step.version, step.base_version):
                raise FormatError(
                    f"object {ref.key}",
                    expected=f"run {step.run}, version {step.version} on {step.base_version}",
                    got=f"run {header.run}, version {header.version} on {header.base_version}",
                )
            part: Folded = {}
            for delta in deltas:
                check(delta)
                _add(part, [delta])
            decoded(part, folded)
            for more in part.values():
                _add(folded, more)
            _check_size(folded, limit)
    reading(None)
    return folded


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
