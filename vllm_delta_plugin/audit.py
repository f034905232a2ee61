"""A full scan of live weights that runs beside serving and starts over when a commit crosses it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from delta_sync.errors import SyncTimeoutError
from vllm_delta_plugin.background import Job, Pace
from vllm_delta_plugin.commit import Device
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.live_digest import Digests
from vllm_delta_plugin.requantised import Module, differences

_TRIES = 100
_REST = 2e-3  # seconds that the GPU is left to the forward pass after each launch


@dataclass(frozen=True)
class Scan:
    """Digest of every region, and one of which this rank has several copies that are not equal, if there is one.

    The digest of such a region is its first copy's, whose changes are the ones that a stage counts.
    """

    sums: dict[str, int]
    unequal: str | None


def scan(job: Job[Any], weights: WeightMap, device: Device, generation: Callable[[], int]) -> Scan:
    """All regions in one commit generation; SyncTimeoutError if commits never leave the time."""
    for _ in range(_TRIES):
        while generation() % 2:  # a swap runs, and ends soon
            job.check()
            time.sleep(_REST)
        found = _scan_once(job, weights, device, generation)
        if found is not None:
            return found
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


def _scan_once(job: Job[Any], weights: WeightMap, device: Device, generation: Callable[[], int]) -> Scan | None:
    regions = [region for regions in weights.regions.values() for region in regions]
    digests, pace = Digests(weights.storages, regions), Pace()
    started = generation()
    if started % 2:
        return None
    with device.reading():
        for launched in digests:
            job.check()
            if generation() != started:
                return None
            if launched:
                time.sleep(_REST)
            else:
                pace()
        values = digests.result
    if generation() != started:
        return None
    sums: dict[str, int] = {}
    unequal = None
    for region, value in zip(regions, values, strict=True):
        if sums.setdefault(region.key, value) != value:
            unequal = region.key
    return Scan(sums, unequal)
