"""The swap on a GPU: one launch per element width, over absolute addresses, so storages need no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_delta_plugin.staged import Update
from vllm_delta_plugin.transfer import to_device

_BLOCK = 1024

try:
    import triton
    import triton.language as tl
except ImportError:  # the torch fallback below is used
    triton = None

if triton is not None:

    @triton.jit(do_not_specialize=["count"])  # type: ignore[untyped-decorator]
    def _exchange(addresses, staged, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        mask = at < count
        live = tl.load(addresses + at, mask=mask, other=0).to(staged.dtype)
        new = tl.load(staged + at, mask=mask)
        old = tl.load(live, mask=mask)
        tl.store(live, new, mask=mask)
        tl.store(staged + at, old, mask=mask)


class GpuSwap:
    """Staged bits in GPU memory, grouped by element width; built on a side stream, swapped on the current one."""

    def __init__(self, updates: Sequence[Update], device: torch.device, committed: Any) -> None:
        self._committed = committed
        self._groups = [_group(same, device) for same in _by_width(updates)]
        self._ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self._ready.record(torch.cuda.current_stream(device))

    def swap(self, between: Callable[[], None]) -> None:
        """See commit.Swap: one launch per width after ``between``, so nothing is half done."""
        between()
        stream = torch.cuda.current_stream()
        stream.wait_event(self._ready)
        for group in self._groups:
            group.exchange(stream)
        self._committed.record(stream)


class _TritonGroup:
    def __init__(self, updates: Sequence[Update], device: torch.device) -> None:
        width = updates[0].storage.dtype.itemsize
        addresses = np.concatenate([u.storage.bits.data_ptr() + u.index * width for u in updates])
        self.addresses = to_device(addresses, device)
        self.staged = to_device(_signed(np.concatenate([u.bits for u in updates])), device)

    def exchange(self, stream: Any) -> None:
        self.addresses.record_stream(stream)
        self.staged.record_stream(stream)
        count = self.staged.numel()
        _exchange[(triton.cdiv(count, _BLOCK),)](self.addresses, self.staged, count, BLOCK=_BLOCK)


class _TorchGroup:
    def __init__(self, updates: Sequence[Update], device: torch.device) -> None:
        self.items = [(u.storage.bits, to_device(u.index, device), to_device(_signed(u.bits), device)) for u in updates]

    def exchange(self, stream: Any) -> None:
        for live, index, staged in self.items:
            index.record_stream(stream)
            staged.record_stream(stream)
            old = live[index]
            live.index_put_((index,), staged)
            staged.copy_(old)


def _group(updates: Sequence[Update], device: torch.device) -> _TritonGroup | _TorchGroup:
    return (_TorchGroup if triton is None else _TritonGroup)(updates, device)


def _by_width(updates: Sequence[Update]) -> list[list[Update]]:
    widths = sorted({u.storage.dtype.itemsize for u in updates})
    return [[u for u in updates if u.storage.dtype.itemsize == width] for width in widths]


def _signed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return bits.view(f"<i{bits.itemsize}")
