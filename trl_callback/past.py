"""One version's bits while the snapshot moves on: what was changed since is remembered, and taken back out."""

from __future__ import annotations

from collections.abc import Mapping

from delta_sync.anchor_files import Head, Tensor
from delta_sync.bitmap import Bits
from delta_sync.delta import apply, fold, raw
from delta_sync.digest import digest, tensor_key
from delta_sync.errors import IntegrityError
from delta_sync.manifest import TensorState
from delta_sync.tensor_delta import TensorDelta


class Past:
    """The version that ``bits``, flat carriers by tensor, held when this was made; no second copy of them.

    Old bits are kept sparsely (10 bytes a changed BF16 element), of tensors that are not released yet.
    """

    def __init__(self, bits: Mapping[str, Bits], states: Mapping[str, TensorState]) -> None:
        self._bits, self._states = bits, dict(states)
        self._undo: dict[str, list[TensorDelta]] = {name: [] for name in bits}

    @property
    def nbytes(self) -> int:
        """Host memory that the old bits take."""
        return sum(d.positions.nbytes + d.values.nbytes for undo in self._undo.values() for d in undo)

    def before(self, deltas: Mapping[str, TensorDelta]) -> None:
        """Note the old bits of what ``deltas`` are about to change; where some are noted already, those are older."""
        for name, delta in deltas.items():
            if name in self._undo:
                old = self._bits[name][delta.positions]
                back = raw(name, delta.dtype, delta.shape, delta.positions, old)
                self._undo[name] = fold([back, *self._undo[name]])

    def tensor(self, head: Head) -> Tensor:
        """A tensor as it was, proven by its digest; IntegrityError if it is not."""
        name, kind, shape = head
        bits = self._bits[name]
        if self._undo[name]:
            bits = bits.copy()
            for back in self._undo[name]:
                apply(back, bits)
        if (got := digest(bits, tensor_key(name))) != self._states[name].digest:
            expected = f"digest {self._states[name].digest:016x}"
            raise IntegrityError(f"tensor {name!r} of an anchor", expected=expected, got=f"{got:016x}")
        return name, kind, shape, bits

    def release(self, name: str) -> None:
        """The tensor will not be asked for again."""
        del self._undo[name]

    def release_all(self) -> None:
        """No tensor will be asked for again."""
        self._undo.clear()
