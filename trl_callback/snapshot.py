"""The bits last published, and the digests that say so."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_sync.anchor_files import Head, Tensor
from delta_sync.delta import apply, new_bits
from delta_sync.digest import digest, digest_change, model_fingerprint, state_digest, tensor_key
from delta_sync.dtypes import DType
from delta_sync.errors import MappingError
from delta_sync.manifest import TensorState
from delta_sync.tensor_delta import TensorDelta
from trl_callback.past import Past
from trl_callback.serving_image import ServingImage, Source

Found = Callable[[TensorDelta], None]


@dataclass(frozen=True)
class _Held:
    dtype: DType
    shape: tuple[int, ...]
    bits: npt.NDArray[np.unsignedinteger]  # flat, owned


class Snapshot:
    """A flat carrier array per tensor (2 bytes an element for BF16), and each tensor's digest.

    Not thread-safe by itself: the publisher's lock keeps ``diff`` and ``apply`` apart.
    """

    def __init__(self, image: ServingImage) -> None:
        self._held: dict[str, _Held] = {}
        self._past: Past | None = None
        self.states: dict[str, TensorState] = {}
        for tensor in image:
            if tensor.name in self._held:
                raise MappingError(f"tensor {tensor.name!r}", expected="one source in the model", got="two")
            self._held[tensor.name] = _Held(tensor.dtype, tensor.shape, self._own(tensor.bits))
            total = digest(tensor.bits, tensor_key(tensor.name))
            self.states[tensor.name] = TensorState(tensor.dtype.name, tensor.shape, total)
        self.total_elements = sum(held.bits.size for held in self._held.values())
        self.total_bytes = sum(held.bits.nbytes for held in self._held.values())

    def _own(self, bits: npt.NDArray[np.unsignedinteger]) -> npt.NDArray[np.unsignedinteger]:
        """A copy to keep."""
        return bits.copy()

    def diff(self, image: ServingImage, found: Found | None = None) -> dict[str, TensorDelta]:
        """What turns the snapshot into ``image``, changed tensors only; MappingError if the model's layout changed.

        ``found`` is told each tensor's delta as soon as there is one.
        """
        changed: dict[str, TensorDelta] = {}
        for source, held in self._matched(image.sources()):
            delta = source.changes(held.bits, held.shape)
            if delta.changed:
                changed[source.name] = delta
                if found is not None:
                    found(delta)
        return changed

    def _matched(self, tensors: Iterable[Source]) -> Iterator[tuple[Source, _Held]]:
        """Every tensor with what is held of it; MappingError unless they are the same ones."""
        missing = set(self._held)
        for tensor in tensors:
            held = self._same(tensor)
            missing.discard(tensor.name)
            yield tensor, held
        if missing:
            raise MappingError(f"tensor {min(missing)!r}", expected="in the model, as in the last version", got="gone")

    def _same(self, tensor: Source) -> _Held:
        held = self._held.get(tensor.name)
        if held is None or held.dtype != tensor.dtype or held.shape != tensor.shape:
            expected = "no such tensor" if held is None else f"{held.dtype.name} {list(held.shape)}"
            raise MappingError(f"tensor {tensor.name!r}", expected=f"{expected}, as in the last version",
                               got=f"{tensor.dtype.name} {list(tensor.shape)}",
                               remedy="don't resize or rename weights while training")  # fmt: skip
        return held

    def advanced(self, deltas: Mapping[str, TensorDelta]) -> dict[str, TensorState]:
        """The states of the tensors that ``deltas`` touch once they are applied; O(changed), changes nothing."""
        return {name: self._advanced(name, delta) for name, delta in deltas.items()}

    def _advanced(self, name: str, delta: TensorDelta) -> TensorState:
        before = self.states[name]
        old = self._held[name].bits[delta.positions]
        change = digest_change(delta.positions, old, new_bits(delta, old), tensor_key(name))
        return TensorState(before.dtype, before.shape, (before.digest + change) % 2**64)

    def apply(self, deltas: Mapping[str, TensorDelta], states: Mapping[str, TensorState]) -> None:
        """Move to the version just committed: its deltas and the states that ``advanced`` gave for them."""
        if self._past is not None:
            self._past.before(deltas)
        for name, delta in deltas.items():
            apply(delta, self._held[name].bits)
        self.states.update(states)

    @property
    def heads(self) -> list[Head]:
        """Name, element type and shape of every tensor, by name: an order that nothing but the model decides."""
        return [(name, held.dtype, held.shape) for name, held in sorted(self._held.items())]

    def remember(self) -> Past:
        """The version it is at, which stays readable while ``apply`` moves on; the one remembered before is let go."""
        self._past = Past({name: held.bits for name, held in self._held.items()}, self.states)
        return self._past

    def bits(self, name: str, dtype: DType, shape: tuple[int, ...]) -> npt.NDArray[np.unsignedinteger]:
        """A tensor's flat bits, those held and no copy: what a context-coded delta is coded against."""
        return self._held[name].bits

    def digest_with(self, states: Mapping[str, TensorState]) -> str:
        """state_digest over all tensors, with ``states`` in place of what they replace."""
        return state_digest({**self.states, **states})

    @property
    def fingerprint(self) -> str:
        """model_fingerprint over all tensors."""
        return model_fingerprint(self.states)

    @property
    def main_dtype(self) -> str:
        """The element type of the largest tensor."""
        return max(self.states.values(), key=lambda state: math.prod(state.shape)).dtype

    def __iter__(self) -> Iterator[Tensor]:
        """(name, element type, shape, flat bits) of every tensor, as anchors are written from."""
        for name, held in self._held.items():
            yield name, held.dtype, held.shape, held.bits
