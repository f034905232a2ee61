"""Host copies of weights as they were loaded, where what is served is made from them: the one thing deltas change.

Nobody sees a shadow ahead of what is served, or behind it: a commit notes what the shadow owes, and whoever reads it
next pays that first. So the engine's thread, on which commits run, does not write a model's changes to host memory too.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from vllm_delta_plugin.exchange import exchange
from vllm_delta_plugin.live_storage import Array, LiveStorage

if TYPE_CHECKING:
    from vllm_delta_plugin.commit import Swap
    from vllm_delta_plugin.staged import Update


class Shadow:
    """All shadow storages of one rank, as far as they change together."""

    def __init__(self) -> None:
        self._owed: Sequence[Update] | None = None
        self._lock = threading.Lock()

    def toggle(self, updates: Sequence[Update]) -> None:
        """From now on the shadow has these bits exchanged with its own; the same call again takes that back."""
        with self._lock:
            if self._owed is updates:
                self._owed = None
                return
            self._pay()
            self._owed = updates

    def settle(self) -> None:
        """Write what a commit left owing; returns when the shadow is what is served."""
        if self._owed is not None:
            with self._lock:
                self._pay()

    def _pay(self) -> None:
        for update in self._owed or ():
            assert isinstance(update.storage, ShadowStorage)
            exchange(update.storage.raw, update.index, update.bits)
        self._owed = None


@dataclass(frozen=True, eq=False)
class ShadowStorage(LiveStorage):
    """One parameter as it was loaded, in host memory; reads wait for what the shadow owes."""

    shadow: Shadow

    @property
    def raw(self) -> Array:
        """The memory itself, whatever is owed."""
        return self.bits.numpy().view(self.dtype.carrier)

    @property
    def array(self) -> Array:
        """See LiveStorage."""
        self.shadow.settle()
        return self.raw

    def read_box(self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Array:
        """See LiveStorage."""
        self.shadow.settle()
        return super().read_box(shape, offset, strides)


class ShadowedSwap:
    """The swap of what is served, after which the shadow owes what it was made from."""

    def __init__(self, served: Swap, shadow: Shadow, updates: Sequence[Update]) -> None:
        self._served, self._shadow, self._updates = served, shadow, updates

    def swap(self, between: Callable[[], None]) -> None:
        """See commit.Swap."""
        self._served.swap(between)
        self._shadow.toggle(self._updates)


def shadow_bytes(storages: Iterable[LiveStorage]) -> int:
    """Bytes of host memory that shadows take."""
    return sum(storage.bits.nbytes for storage in storages if isinstance(storage, ShadowStorage))


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's values in host memory of the same layout, nothing else in its storage."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
    with torch.no_grad():
        return copy.copy_(tensor.detach())


def signed(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Unsigned carriers seen as the signed integers that torch has."""
    return array.view(np.dtype(f"<i{array.itemsize}"))
