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
    return [bits for _, bits in versions(uri, start)][-1]


def versions(uri: str, start: Iterable[Tensor] = ()) -> Iterator[tuple[Manifest, dict[str, bytes]]]:
    """Each version from the newest anchor, or from ``start``, on: its manifest and every tensor's bits."""
    ledger = Ledger(open_store(uri))
    bits: dict[str, np.ndarray] = {}
    layout: dict[str, tuple[str, tuple[int, ...]]] = {}

    def take(tensors: Iterable[Tensor]) -> None:
        for name, kind, shape, values in tensors:
            bits[name], layout[name] = values.copy(), (kind.name, shape)

    def states() -> dict[str, TensorState]:
        return {name: TensorState(*layout[name], digest(bits[name], tensor_key(name))) for name in bits}

    take(start)
    plan = ledger.plan(None, state_digest(states()))
    assert plan is not None
    if plan.anchor is not None:
        take(iter_anchor_tensors(ledger, plan.anchor))
    base = plan.deltas[0].base_version if plan.deltas else plan.target.version
    for manifest in [m for m in chain_left(uri) if m.version >= (base or 0)]:
        for ref in manifest.objects if manifest.version != base else ():
            header, deltas = decode_against(ledger.read_object(ref), lambda name, *_: bits[name].copy())
            assert (header.version, header.base_version) == (manifest.version, manifest.base_version)
            for delta in deltas:
                apply(delta, bits[delta.name])
        for name, state in manifest.tensors.items():
            assert state.digest == digest(bits[name], tensor_key(name)), (manifest.version, name)
        assert state_digest(states()) == manifest.state_digest
        yield manifest, {name: values.tobytes() for name, values in bits.items()}


def cast_bytes(state: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.contiguous().view(torch.uint8).numpy().tobytes() for name, t in state.items()}


def tensors(state: dict[str, torch.Tensor]) -> list[Tensor]:
    """A bfloat16 checkpoint as what anchors are made of."""
    bits = {name: tensor.contiguous().view(torch.int16).numpy().view("<u2") for name, tensor in state.items()}
    return [(name, dtype("BF16"), tuple(state[name].shape), values.reshape(-1)) for name, values in bits.items()]
