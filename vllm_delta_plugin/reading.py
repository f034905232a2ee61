"""What a rank reads from the store: how many bytes, and when."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from delta_sync.ledger import Ledger
from delta_sync.manifest import ObjectRef


@dataclass(frozen=True)
class Reading:
    """Objects and bytes read, from the first's request (``began``) to the last's arrival (``ended``), unix seconds."""

    objects: int = 0
    bytes: int = 0
    began: float = 0.0
    ended: float = 0.0

    @classmethod
    def of(cls, replies: Sequence[Mapping[str, Any]]) -> Reading:
        """All ranks' readings as one."""
        parts = [cls(**reply["read"]) for reply in replies if reply.get("read")]
        parts = [part for part in parts if part.objects]
        if not parts:
            return NOTHING
        began, ended = min(part.began for part in parts), max(part.ended for part in parts)
        return cls(sum(part.objects for part in parts), sum(part.bytes for part in parts), began, ended)


NOTHING = Reading()


class ReadingLedger(Ledger):
    """A ledger that notes what objects are read from it, from the store or a cache, since ``begin``.

    Objects are read on several threads at once.
    """

    _read = NOTHING
    _noting = threading.Lock()

    def begin(self) -> None:
        """Start from nothing."""
        self._read = NOTHING

    @property
    def read(self) -> dict[str, Any]:
        """The reading so far, as a rank's reply carries it."""
        return asdict(self._read)

    def read_object(self, ref: ObjectRef) -> bytes:
        """As Ledger's."""
        asked = time.time()
        data = super().read_object(ref)
        with self._noting:
            before = self._read
            began = min(before.began, asked) if before.objects else asked
            self._read = Reading(before.objects + 1, before.bytes + len(data), began, time.time())
        return data
