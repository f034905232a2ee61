"""A full scan of live weights that runs beside serving and starts over when a commit crosses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from delta_sync.errors import SyncTimeoutError
from vllm_delta_plugin.background import Job, Pace
from vllm_delta_plugin.commit import Device
from vllm_delta_plugin.coverage import WeightMap, note_sum
from vllm_delta_plugin.live_digest import Digests
from vllm_delta_plugin.requantised import Module, differences

_TRIES = 100
# After so many elements the GPU, which takes 0.05 ms for them (H200), is left to the forward pass for so many seconds.
_SHARE, _REST = 1 << 25, 2e-3


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
    regions = [region for regions in weights.regions.values() for region in regions]
    digests, pace, given = Digests(weights.storages, regions), Pace(), 0
    started = generation()
    with device.reading():
        for elements in digests:
            job.check()
            if generation() != started:
                return None
            given += elements
            if given < _SHARE:
                pace()
                continue
            given = 0
            time.sleep(_REST)
        values = digests.result
    if generation() != started:
        return None
    sums: dict[str, int] = {}
    for region, value in zip(regions, values, strict=True):
        note_sum(sums, region.key, value)
    return sums
