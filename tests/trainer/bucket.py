"""What a bucket says a version is, rebuilt from nothing but the bucket: the oracle of the trainer's tests."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from delta_sync.anchor_files import Tensor, iter_anchor_tensors
from delta_sync.context_file import decode_against
from delta_sync.delta import apply
from delta_sync.digest import digest, state_digest, tensor_key
from delta_sync.dtypes import dtype
from delta_sync.errors import ChainError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest, TensorState
from delta_sync.plan import Step
from delta_sync.store.open import open_store


def newest(uri: str) -> Manifest:
    head = Ledger(open_store(uri)).head()
    assert head is not None
    return head


def chain(uri: str) -> list[Manifest]:
    """Every version on the newest one's chain, oldest first."""
    ledger = Ledger(open_store(uri))
    head = ledger.head()
    return [] if head is None else [*reversed(ledger.ancestors(head, 1)), head]


def chain_left(uri: str) -> list[Manifest]:
    """What retention left of it, oldest first."""
    ledger = Ledger(open_store(uri))
    found = [newest(uri)]
    with contextlib.suppress(ChainError):
        while (parent := ledger.parent(found[0])) is not None:
            found.insert(0, parent)
    return found


def materialise(uri: str, start: Iterable[Tensor] = ()) -> dict[str, bytes]:
    """The newest version's bits from its anchor (or from ``start``, proven to be a version's) and the deltas after it.

    Every digest is proven on the way.
    """
    rebuilt = Rebuilt(uri, start)
    for step in rebuilt.plan.deltas:
        rebuilt.apply(step)
    assert state_digest(rebuilt.states()) == rebuilt.plan.target.state_digest
    return rebuilt.bytes()


def versions(uri: str, start: Iterable[Tensor] = ()) -> Iterator[tuple[Manifest, dict[str, bytes]]]:
    """Each version from the newest anchor, or from ``start``, on: its manifest and every tensor's bits, proven."""
    rebuilt = Rebuilt(uri, start)
    for manifest in chain(uri):
        if manifest.version > rebuilt.version:
            rebuilt.apply(manifest)
        if manifest.version >= rebuilt.version:
            assert state_digest(rebuilt.states()) == manifest.state_digest
            yield manifest, rebuilt.bytes()


class Rebuilt:
    """The bits of the version that a reader's plan starts from, then of those whose deltas are applied."""

    def __init__(self, uri: str, start: Iterable[Tensor]) -> None:
        self._ledger = Ledger(open_store(uri))
        self._bits: dict[str, np.ndarray] = {}
        self._layout: dict[str, tuple[str, tuple[int, ...]]] = {}
        self._take(start)
        plan = self._ledger.plan(None, state_digest(self.states()))
        assert plan is not None
        self.plan = plan
        self.version = (plan.deltas[0].base_version or 0) if plan.deltas else plan.target.version
        if plan.anchor is not None:
            self._take(iter_anchor_tensors(self._ledger, plan.anchor))

    def _take(self, tensors: Iterable[Tensor]) -> None:
        for name, kind, shape, values in tensors:
            self._bits[name], self._layout[name] = values.copy(), (kind.name, shape)

    def states(self) -> dict[str, TensorState]:
        return {n: TensorState(*self._layout[n], digest(bits, tensor_key(n))) for n, bits in self._bits.items()}

    def apply(self, step: Step) -> None:
        for ref in step.objects:
            header, deltas = decode_against(self._ledger.read_object(ref), lambda name, *_: self._bits[name].copy())
            assert (header.version, header.base_version) == (step.version, step.base_version)
            for delta in deltas:
                apply(delta, self._bits[delta.name])
        for name, state in step.tensors.items():
            assert state.digest == digest(self._bits[name], tensor_key(name)), (step.version, name)
        self.version = step.version

    def bytes(self) -> dict[str, bytes]:
        return {name: values.tobytes() for name, values in self._bits.items()}


def cast_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def tensors(state: dict[str, torch.Tensor]) -> list[Tensor]:
    """A bfloat16 checkpoint as what anchors are made of."""
    bits = {name: tensor.contiguous().view(torch.int16).numpy().view("<u2") for name, tensor in state.items()}
    return [(name, dtype("BF16"), tuple(state[name].shape), values.reshape(-1)) for name, values in bits.items()]
