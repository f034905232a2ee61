"""A full scan of live weights that runs beside serving and starts over when a commit crosses it."""

from __future__ import annotations

from collections.abc import Callable

from delta_sync.errors import SyncTimeoutError
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.commit import Device
from vllm_delta_plugin.coverage import WeightMap, note_sum
from vllm_delta_plugin.live_digest import region_digest

_TRIES = 100


def scan(job: Job[dict[str, int]], weights: WeightMap, device: Device, generation: Callable[[], int]) -> dict[str, int]:
    """Digest of every region, all of one commit generation; SyncTimeoutError if commits never leave the time."""
    for _ in range(_TRIES):
        sums = _scan_once(job, weights, device, generation)
        if sums is not None:
            return sums
    raise SyncTimeoutError("audit", expected="one scan between two commits", got=f"{_TRIES} scans crossed by commits")


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
