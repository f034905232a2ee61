"""The swap on a GPU: what is staged are the bits that differ, and flipping them twice leaves live bits as they were.

One launch for each staged object and element width, over absolute addresses, so storages need no loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vllm_delta_plugin.commit import all_or_none
from vllm_delta_plugin.live_storage import HAS_TRITON
from vllm_delta_plugin.staged import StageBuilder, Update
from vllm_delta_plugin.transfer import to_device

if HAS_TRITON:
    from vllm_delta_plugin.gpu_kernels import BLOCK, FLIP_WARPS, flip
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
        """See commit.Swap."""
        stream = torch.cuda.current_stream()
        stream.wait_event(self._ready)
        try:
            all_or_none(self._groups, lambda group: group.flip(stream), between)
        finally:
            self._committed.record(stream)


class _TritonGroup:
    def __init__(self, ready: OnDevice) -> None:
        self._ready = ready

    def flip(self, stream: Any) -> None:
        addresses, staged = self._ready.addresses, self._ready.staged
        addresses.record_stream(stream)
        staged.record_stream(stream)
        count = staged.numel()
        flip[(-(-count // BLOCK),)](
            addresses, staged, count, WIDTH=8 * staged.element_size(), BLOCK=BLOCK, num_warps=FLIP_WARPS
        )


class _TorchGroup:
    def __init__(self, update: Update, device: torch.device) -> None:
        self._live = update.storage.bits
        self._index, self._staged = _uploaded(update, device)

    def flip(self, stream: Any) -> None:
        self._index.record_stream(stream)
        self._staged.record_stream(stream)
        self._live.index_put_((self._index,), self._live[self._index] ^ self._staged)


def _groups(builder: StageBuilder, device: torch.device) -> list[Any]:
    updates = builder.updates()
    if not HAS_TRITON:
        return [_TorchGroup(update, device) for update in updates]
    ready = list(builder.on_device) if isinstance(builder, GpuStageBuilder) else []
    return [_TritonGroup(group) for group in [*ready, *(_joined(same, device) for same in _by_width(updates))]]


def _joined(updates: Sequence[Update], device: torch.device) -> OnDevice:
    width = updates[0].storage.dtype.itemsize
    parts = [(update.storage.bits.data_ptr(), *_uploaded(update, device)) for update in updates]
    addresses = torch.cat([begin + index * width for begin, index, _ in parts])
    return OnDevice(addresses, torch.cat([staged for _, _, staged in parts]))


def _uploaded(update: Update, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the update's elements are in their storage (int64 ``[n]``), and in which bits they differ from it."""
    index = to_device(update.index, device)
    bits = to_device(update.bits.view(f"<i{update.bits.itemsize}"), device)
    return index, bits ^ update.storage.bits[index]


def _by_width(updates: Sequence[Update]) -> list[list[Update]]:
    widths = sorted({u.storage.dtype.itemsize for u in updates})
    return [[u for u in updates if u.storage.dtype.itemsize == width] for width in widths]
