"""Folding the deltas of one tensor, in version order, into one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits, bits_of, masks, ordinal
from delta_sync.checks import check
from delta_sync.errors import FormatError
from delta_sync.jit import compiled
from delta_sync.tensor_delta import TensorDelta


@dataclass(frozen=True)
class _Change:
    """ULP steps and raw bits of one tensor in one sorted list; ``absolute[i]`` tells which value i is."""

    positions: npt.NDArray[np.int64]
    values: Bits
    absolute: npt.NDArray[np.bool_]


@compiled
def _compose(at1: Any, value1: Any, raw1: Any, at2: Any, value2: Any, raw2: Any, sign: Any, flip: Any) -> Any:
    """Merge two sorted lists; where both name a position, the later one acts on what the earlier one left."""
    room = at1.size + at2.size
    at, value, raw = np.empty(room, np.int64), np.empty(room, value1.dtype), np.empty(room, np.bool_)
    i = j = n = 0
    while i < at1.size or j < at2.size:
        if j == at2.size or (i < at1.size and at1[i] < at2[j]):
            at[n], value[n], raw[n] = at1[i], value1[i], raw1[i]
            i += 1
        elif i == at1.size or at2[j] < at1[i] or raw2[j]:
            if i < at1.size and at1[i] == at2[j]:
                i += 1
            at[n], value[n], raw[n] = at2[j], value2[j], raw2[j]
            j += 1
        else:
            step = np.uint64(value2[j])
            at[n], raw[n] = at1[i], raw1[i]
            if raw1[i]:
                value[n] = bits_of(ordinal(np.uint64(value1[i]), sign, flip) + step, sign, flip)
            else:
                value[n] = np.uint64(value1[i]) + step
            i += 1
            j += 1
        if raw[n] or value[n] != 0:
            n += 1
    return at[:n].copy(), value[:n].copy(), raw[:n].copy()


def fold(deltas: Sequence[TensorDelta]) -> list[TensorDelta]:
    """One tensor's deltas, oldest first, as at most one ULP and one raw delta with disjoint positions.

    Applying the result equals applying all in turn; steps that cancel are dropped. FormatError if they differ in
    name, dtype or shape.
    """
    if not deltas:
        return []
    first = deltas[0]
    for delta in deltas:
        _check_same_tensor(first, delta)
        check(delta)
    signs = masks(first.dtype)
    changes = [_Change(d.positions, d.values, np.full(d.changed, d.encoding == "raw")) for d in deltas]
    while len(changes) > 1:  # composition is associative: a balanced tree moves every element log2(n) times
        pairs = zip(changes[::2], changes[1::2], strict=False)
        odd = changes[-1:] if len(changes) % 2 else []
        changes = [_composed(a, b, signs) for a, b in pairs] + odd
    return _split(first, changes[0])


def _composed(first: _Change, second: _Change, signs: tuple[np.uint64, np.uint64]) -> _Change:
    a, b = first, second
    return _Change(*_compose(a.positions, a.values, a.absolute, b.positions, b.values, b.absolute, *signs))


def _split(like: TensorDelta, change: _Change) -> list[TensorDelta]:
    steps = TensorDelta(like.name, like.dtype, like.shape, "ulp", *_where(change, ~change.absolute))
    bits = TensorDelta(like.name, like.dtype, like.shape, "raw", *_where(change, change.absolute))
    return [delta for delta in (steps, bits) if delta.changed]


def _where(change: _Change, chosen: npt.NDArray[np.bool_]) -> tuple[npt.NDArray[np.int64], Bits]:
    return change.positions[chosen], change.values[chosen]


def _check_same_tensor(first: TensorDelta, other: TensorDelta) -> None:
    if (other.name, other.dtype, other.shape) != (first.name, first.dtype, first.shape):
        expected = f"{first.name} {first.dtype.name} {list(first.shape)}"
        got = f"{other.name} {other.dtype.name} {list(other.shape)}"
        raise FormatError("deltas to fold", expected=expected, got=got, remedy="fold each tensor on its own")


@compiled
def _meet(first: Any, second: Any) -> Any:
    i = j = 0
    while i < first.size and j < second.size:
        if first[i] == second[j]:
            return True
        if first[i] < second[j]:
            i += 1
        else:
            j += 1
    return False


def disjoint(first: TensorDelta, second: TensorDelta) -> bool:
    """Whether two deltas of one tensor name no position both."""
    return not _meet(first.positions, second.positions)
