"""A version's objects, each of some tensors' changes: one is encoded while others are uploaded, and more are found."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass

from delta_sync.context_file import CODECS
from delta_sync.gap_codec import DEFAULT_CODEC
from delta_sync.manifest import ObjectRef
from delta_sync.tensor_delta import TensorDelta

PARALLEL = 4  # parts in work at once, encoding or uploading: bounds memory and connections

Encode = Callable[[Sequence[TensorDelta]], tuple[bytes, str]]
Put = Callable[[bytes], ObjectRef]


@dataclass(frozen=True)
class Stored:
    """One object in the store: where, what, the codec it is coded with, and the upload's unix times."""

    ref: ObjectRef
    data: bytes
    codec: str
    began: float
    ended: float


class Parts:
    """Changes come in one tensor at a time; every ``bucket_bytes`` of their weights make one object.

    ``encode`` and ``put`` run on threads of this object's own. Nothing that is stored here is part of a run before a
    manifest names it, so that a failure, or ``abandon``, leaves at most unused objects.
    """

    def __init__(self, encode: Encode, put: Put, bucket_bytes: int, version: int = 0) -> None:
        self.version = version  # that the objects are of
        self._encode, self._put, self._most = encode, put, bucket_bytes
        self._filling: list[TensorDelta] = []
        self._bytes = 0
        self._coded: dict[int, tuple[bytes, str]] = {}
        self._parts: list[Sequence[TensorDelta]] = []
        self._stored: list[Future[Stored]] = []
        self._failed: list[int] = []  # when it was last waited for
        self._due: deque[int] = deque()
        self._lock = threading.Lock()  # guards what is due and how many threads there are
        self._threads = 0

    def add(self, delta: TensorDelta) -> None:
        """Take one tensor's changes; work begins once enough have come."""
        size = _weight(delta)
        if self._filling and self._bytes + size > self._most:
            self._complete()
        self._filling.append(delta)
        self._bytes += size

    def finish(self) -> list[Stored]:
        """All objects, in order, once all are stored; after an error, which comes when nothing runs any more, again."""
        if self._filling:
            self._complete()
        for number in self._failed:
            self._stored[number] = Future()
            self._begin(number)
        wait(self._stored)
        self._failed = [number for number, future in enumerate(self._stored) if future.exception() is not None]
        return [future.result() for future in self._stored]

    def abandon(self) -> None:
        """Begin nothing more; what runs comes to its end unheeded."""
        with self._lock:
            self._due.clear()

    def _complete(self) -> None:
        self._parts.append(self._filling)
        self._stored.append(Future())
        self._filling, self._bytes = [], 0
        self._begin(len(self._parts) - 1)

    def _begin(self, number: int) -> None:
        with self._lock:
            self._due.append(number)
            if self._threads == PARALLEL:
                return
            self._threads += 1
        # Daemons, as a store call may never return: the interpreter's exit does not wait for it.
        threading.Thread(target=self._work, name="delta-sync-part", daemon=True).start()

    def _work(self) -> None:
        while True:
            with self._lock:
                if not self._due:
                    self._threads -= 1
                    return
                number = self._due.popleft()
            try:
                self._stored[number].set_result(self._store(number))
            except BaseException as error:  # noqa: BLE001 (whoever finishes raises it)
                self._stored[number].set_exception(error)

    def _store(self, number: int) -> Stored:
        if number not in self._coded:  # once, so that every try stores the same bytes
            self._coded[number] = self._encode(self._parts[number])
        data, codec = self._coded[number]
        began = time.time()
        return Stored(self._put(data), data, codec, began, time.time())


def _weight(delta: TensorDelta) -> int:
    """Bytes of the tensor's weights."""
    size = delta.dtype.itemsize
    for length in delta.shape:
        size *= length
    return size


def codec_of_all(codecs: Iterable[str]) -> str:
    """What a manifest says of objects in several codecs: the one that asks most of a reader."""
    return max(codecs, key=CODECS.index, default=DEFAULT_CODEC)
