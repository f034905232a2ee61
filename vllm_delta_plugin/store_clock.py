"""How long the store has been asked for one thing, and a word in status if no answer comes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

from delta_sync.errors import StoreError
from vllm_delta_plugin.status import Status

_SLOW = 30.0  # seconds without an answer after which status says so


class StoreClock:
    """One for all that a coordinator's thread asks stores for; another thread complains, as that one is held up."""

    def __init__(self) -> None:
        self._asking: tuple[str, float] | None = None  # for what, and since when

    @contextlib.contextmanager
    def asking(self, what: str) -> Iterator[None]:
        """A store is asked meanwhile, and may take its time."""
        before, self._asking = self._asking, (what, time.monotonic())
        try:
            yield
        finally:
            self._asking = before

    def complain_if_slow(self, status: Status) -> None:
        """A word in status if the store has not answered for long."""
        asking = self._asking  # read once: the other thread sets it
        if asking is not None and time.monotonic() - asking[1] > _SLOW:
            error = StoreError(
                asking[0],
                expected=f"the store's answer within {_SLOW:g} s",
                got="none yet",
                remedy="look at that file system or store; the weights that are live go on serving",
            )
            status.note_error(error)
