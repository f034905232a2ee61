"""The swap: staged and live bits change places, so that doing it twice undoes it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol, TypeVar

import torch

from delta_sync.context_file import Decoded, decode_if_alone, unpack_if_alone
from delta_sync.delta_file import Unpacked
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.exchange import exchange
from vllm_delta_plugin.live_storage import HAS_TRITON, LiveStorage, model_device
from vllm_delta_plugin.staged import StageBuilder, Update

Part = TypeVar("Part")
_HOST_SHARE = 4  # staging may use this fraction of what memory is free


class HalfSwapped(Exception):
    """A swap failed, and what it had done could not be taken back: live bits are of two versions."""


class Swap(Protocol):
    """Staged bits of all storages of one rank."""

    def swap(self, between: Callable[[], None]) -> None:
        """Exchange staged and live bits, calling ``between`` on the way; on an exception live bits are as before.

        HalfSwapped if they are not.
        """


def all_or_none(parts: Sequence[Part], exchange: Callable[[Part], None], between: Callable[[], None]) -> None:
    """``exchange`` every part, ``between`` half way, of one part before; on an exception undo it by doing it again.

    HalfSwapped if that fails too.
    """
    done: list[Part] = []
    try:
        for number, part in enumerate(parts):
            if number == len(parts) // 2:
                between()
            exchange(part)
            done.append(part)
    except BaseException as error:
        try:
            for part in done:
                exchange(part)
        except BaseException as second:  # noqa: BLE001  # told as what it means
            raise HalfSwapped(f"{error!r}, and then {second!r}") from error
        raise


class Device(Protocol):
    """Where a rank's weights live, as far as staging and committing care."""

    def reading(self) -> Any:
        """Context in which a background thread may read live weights."""

    def builder(self, weights: WeightMap, limit: int) -> StageBuilder:
        """What collects a version's changes; ``limit`` is in bytes of staged data."""

    def read(self, data: bytes) -> Unpacked | Decoded | bytes:
        """What a fetching thread makes of an object's bytes, as far as that needs no base."""

    def prepare(self, builder: StageBuilder) -> Swap:
        """Bring staged bits next to the live ones; called from the background thread."""

    def staging_limit(self) -> int:
        """Bytes that staging may use now."""


class HostSwap:
    """Staged bits beside weights in host memory."""

    def __init__(self, updates: Sequence[Update]) -> None:
        self._updates = list(updates)

    def swap(self, between: Callable[[], None]) -> None:
        """See Swap."""
        all_or_none(self._updates, _exchange, between)


def _exchange(update: Update) -> None:
    exchange(update.storage.array, update.index, update.bits)


class Host:
    """Weights in host memory: readers and the forward pass share it, nothing needs to be moved."""

    def reading(self) -> Any:
        """See Device."""
        return nullcontext()

    def builder(self, weights: WeightMap, limit: int) -> StageBuilder:
        """See Device."""
        return StageBuilder(weights, limit)

    def read(self, data: bytes) -> Unpacked | Decoded | bytes:
        """See Device."""
        return decode_if_alone(data)

    def prepare(self, builder: StageBuilder) -> Swap:
        """See Device."""
        return HostSwap(builder.updates())

    def staging_limit(self) -> int:
        """See Device."""
        return available_memory() // _HOST_SHARE


class Cuda:
    """Weights on one GPU: a side stream reads and uploads, the worker's own stream commits."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        # The last swap's place on the worker's stream.
        self.committed = torch.cuda.Event()  # type: ignore[no-untyped-call]

    @contextmanager
    def reading(self) -> Iterator[None]:
        """See Device."""
        torch.cuda.set_device(self._device)
        with torch.cuda.stream(self._side):
            self._side.wait_event(self.committed)
            yield

    def builder(self, weights: WeightMap, limit: int) -> StageBuilder:
        """See Device."""
        if not HAS_TRITON:
            return StageBuilder(weights, limit)
        from vllm_delta_plugin.gpu_stage import GpuStageBuilder

        return GpuStageBuilder(weights, limit)

    def read(self, data: bytes) -> Unpacked | Decoded | bytes:
        """See Device."""
        return unpack_if_alone(data) if HAS_TRITON else decode_if_alone(data)

    def prepare(self, builder: StageBuilder) -> Swap:
        """See Device."""
        from vllm_delta_plugin.gpu_swap import GpuSwap

        with self.reading():
            builder.finish()
            return GpuSwap(builder, self._device, self.committed)

    def staging_limit(self) -> int:
        """See Device."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return min(free // 2, available_memory() // _HOST_SHARE)


def device_of(storages: Sequence[LiveStorage]) -> Device:
    """The device that the model runs on."""
    device = model_device(storages)
    return Host() if device.type == "cpu" else Cuda(device)


def available_memory() -> int:
    """Host memory in bytes that can be used without swapping."""
    import psutil

    return int(psutil.virtual_memory().available)
