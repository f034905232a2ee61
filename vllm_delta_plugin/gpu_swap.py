"""The swap on a GPU: one launch per element width, over absolute addresses, so storages need no loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from vllm_delta_plugin.live_storage import HAS_TRITON
from vllm_delta_plugin.staged import StageBuilder, Update
from vllm_delta_plugin.transfer import to_device

if HAS_TRITON:
    from vllm_delta_plugin.gpu_kernels import BLOCK, exchange
    from vllm_delta_plugin.gpu_pieces import OnDevice
    from vllm_delta_plugin.gpu_stage import GpuStageBuilder


class GpuSwap:
    """Staged bits in GPU memory, grouped by element width; built on a side stream, swapped on the current one."""

    def __init__(self, builder: StageBuilder, device: torch.device, committed: Any) -> None:
        self._committed = committed
        self._groups = _groups(builder, device)
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
    def __init__(self, ready: OnDevice) -> None:
        self._ready = ready

    def exchange(self, stream: Any) -> None:
        addresses, staged = self._ready.addresses, self._ready.staged
        addresses.record_stream(stream)
        staged.record_stream(stream)
        count = staged.numel()
        exchange[(-(-count // BLOCK),)](addresses, staged, count, BLOCK=BLOCK)


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


def _groups(builder: StageBuilder, device: torch.device) -> list[Any]:
    updates = builder.updates()
    if not HAS_TRITON:
        return [_TorchGroup(updates, device)]
    ready = list(builder.on_device) if isinstance(builder, GpuStageBuilder) else []
    return [_TritonGroup(group) for group in [*ready, *(_uploaded(same, device) for same in _by_width(updates))]]


def _uploaded(updates: Sequence[Update], device: torch.device) -> OnDevice:
    width = updates[0].storage.dtype.itemsize
    addresses = np.concatenate([u.storage.bits.data_ptr() + u.index * width for u in updates])
    staged = _signed(np.concatenate([u.bits for u in updates]))
    return OnDevice(to_device(addresses, device), to_device(staged, device))


def _by_width(updates: Sequence[Update]) -> list[list[Update]]:
    widths = sorted({u.storage.dtype.itemsize for u in updates})
    return [[u for u in updates if u.storage.dtype.itemsize == width] for width in widths]


def _signed(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return bits.view(f"<i{bits.itemsize}")
