"""The swap on a GPU: what is staged are the bits that differ, and flipping them twice leaves live bits as they were.

One launch for each element width, over absolute addresses, so neither storages nor staged objects need a loop.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from vllm_delta_plugin.commit import all_or_none
from vllm_delta_plugin.live_storage import HAS_TRITON
from vllm_delta_plugin.staged import StageBuilder, Update
from vllm_delta_plugin.transfer import to_device

if HAS_TRITON:
    from vllm_delta_plugin.gpu_kernels import BLOCK, FLIP_WARPS, flip
    from vllm_delta_plugin.gpu_pieces import OnDevice, by_width, joined
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
    """What is staged for elements of one width, at least one."""

    def __init__(self, parts: Sequence[OnDevice], device: torch.device) -> None:
        self._parts = parts
        programs = [-(-part.staged.numel() // BLOCK) for part in parts]
        *begins, total = accumulate(programs, initial=0)
        rows = [
            (part.addresses.data_ptr(), part.staged.data_ptr(), part.staged.numel(), begin)
            for part, begin in zip(parts, begins, strict=True)
        ]
        self._grid = (total,)
        self._table = to_device(np.array(rows, np.int64).reshape(-1), device)
        self._part_of = to_device(np.repeat(np.arange(len(parts), dtype=np.int32), programs), device)

    def flip(self, stream: Any) -> None:
        for tensor in (self._table, self._part_of, *(t for part in self._parts for t in (part.addresses, part.staged))):
            tensor.record_stream(stream)
        like = self._parts[0].staged
        flip[self._grid](
            like, self._part_of, self._table, WIDTH=8 * like.element_size(), BLOCK=BLOCK, num_warps=FLIP_WARPS
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
    parts = [*ready, *joined([_uploaded_addresses(update, device) for update in updates])]
    return [_TritonGroup(same, device) for same in by_width(parts)]


def _uploaded_addresses(update: Update, device: torch.device) -> OnDevice:
    index, staged = _uploaded(update, device)
    return OnDevice(update.storage.bits.data_ptr() + index * update.storage.dtype.itemsize, staged)


def _uploaded(update: Update, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the update's elements are in their storage (int64 ``[n]``), and in which bits they differ from it."""
    index = to_device(update.index, device)
    bits = to_device(update.bits.view(f"<i{update.bits.itemsize}"), device)
    return index, bits ^ update.storage.bits[index]
