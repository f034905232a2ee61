"""A full scan of live weights that runs beside serving and starts over when a commit crosses it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from delta_sync.errors import SyncTimeoutError
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.commit import Device
from vllm_delta_plugin.coverage import WeightMap, note_sum
from vllm_delta_plugin.live_digest import region_digest
from vllm_delta_plugin.requantised import Module, differences

_TRIES = 100


def scan(job: Job[dict[str, int]], weights: WeightMap, device: Device, generation: Callable[[], int]) -> dict[str, int]:
    """Digest of every region, all of one commit generation; SyncTimeoutError if commits never leave the time."""
    for _ in range(_TRIES):
        sums = _scan_once(job, weights, device, generation)
        if sums is not None:
            return sums
    raise SyncTimeoutError("audit", expected="one scan between two commits", got=f"{_TRIES} scans crossed by commits")


def damaged(job: Job[Any], weights: WeightMap, device: Device, generation: Callable[[], int]) -> str | None:
    """A module that is not served as vLLM makes it of its weights, if there is one among those whose turn it is.

    SyncTimeoutError if commits never leave the time.
    """
    for module in weights.requantised.turn() if weights.requantised else ():
        if _differs(job, weights, module, device, generation):
            return module.name
    return None


def _differs(job: Job[Any], weights: WeightMap, module: Module, device: Device, generation: Callable[[], int]) -> bool:
    for _ in range(_TRIES):
        job.check()
        started = generation()
        with device.reading():
            found = differences(weights.storages, module, {})
        if generation() == started and not started % 2:
            return bool(found)
    raise SyncTimeoutError("audit", expected="a module between two commits", got=f"{_TRIES} crossed by commits")


def _scan_once(
    job: Job[dict[str, int]], weights: WeightMap, device: Device, generation: Callable[[], int]
) -> dict[str, int] | None:
    sums: dict[str, int] = {}
    started = generation()
    with device.reading():
        for region in (region for regions in weights.regions.values() for region in regions):
            job.check()
            value = region_digest(weights.storages[region.storage], region)
            if generation() != started:
                return None
            note_sum(sums, region.key, value)
    return sums
