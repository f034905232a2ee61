"""A folder that takes its time: what a trainer captured is still on its way when the trainer ends."""

from __future__ import annotations

import time
from typing import Any

from delta_sync.store.local import LocalStore


def install(seconds: float) -> None:
    """Every write of this process to a folder takes so much longer, by way of a pool, as stores of the network do."""
    from concurrent.futures import ThreadPoolExecutor

    put = LocalStore.put

    def slow(self: LocalStore, *args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(time.sleep, seconds).result()
        return put(self, *args, **kwargs)

    LocalStore.put = slow  # type: ignore[method-assign]


def install_for_files(seconds: float) -> None:
    """Every file, as anchors have them, takes so much longer."""
    put_file = LocalStore.put_file

    def slow(self: LocalStore, *args: Any) -> None:
        time.sleep(seconds)
        put_file(self, *args)

    LocalStore.put_file = slow  # type: ignore[method-assign]
