"""One rank's part in publishing: its snapshot, what it captured, and the object that it stores for each version."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from delta_sync.context_file import encode_deltas_against
from delta_sync.delta_file import DEFAULT_CODEC, DeltaHeader, encode_delta
from delta_sync.errors import SyncTimeoutError
from delta_sync.gap_codec import codec_without_base
from delta_sync.manifest import ObjectRef
from delta_sync.store.base import Store
from delta_sync.tensor_delta import TensorDelta
from delta_sync.writer import object_ref
from trl_callback.chain import KEPT_BYTES
from trl_callback.config import CODECS, DeltaSyncConfig
from trl_callback.layout import Region
from trl_callback.shard_image import ShardImage
from trl_callback.shard_snapshot import Bits, Key, ShardSnapshot

HANDED_OVER = 60.0  # seconds a captured step may take from the training thread to this side
ANCHOR_BYTES = 64 * 1024**2  # of a piece sent to rank 0 at once
Run = tuple[str, Region, int, Bits]  # tensor, piece of it, first index within the piece, at most ANCHOR_BYTES of bits


@dataclass(frozen=True)
class Order:
    """What a version is to be called: the same for all ranks' objects of it."""

    run: str
    version: int
    epoch: int
    step: int


def cut_runs(size: int, itemsize: int) -> Iterator[tuple[int, int]]:
    """(first, size) of the runs in which a piece of ``size`` elements travels to rank 0."""
    step = ANCHOR_BYTES // itemsize
    return ((first, min(step, size - first)) for first in range(0, size, step))


@dataclass
class _Coded:
    order: Order
    deltas: Mapping[Key, TensorDelta]
    ref: ObjectRef | None  # None: nothing changed here
    data: bytes
    codec: str
    sums: dict[str, int]
    stored: bool = False


class RankPart:
    """Obeys rank 0, on a background thread; the training thread only captures.

    A capture is made when nothing is in flight, so it is relative to the version before, on all ranks alike.
    """

    def __init__(self, image: ShardImage, config: DeltaSyncConfig, open_store: Callable[[], Store]) -> None:
        self.image, self.snapshot = image, ShardSnapshot(image)
        self._codec, self._open_store = CODECS[config.codec], open_store
        self._grid = (config.tiles, config.tiles)
        self._store: Store | None = None
        self._captured: dict[int, Mapping[Key, TensorDelta]] = {}
        self._changed = threading.Condition()
        self._coded: _Coded | None = None
        self._kept: OrderedDict[int, tuple[ObjectRef | None, bytes]] = OrderedDict()

    def submit(self, step: int, deltas: Mapping[Key, TensorDelta]) -> None:
        """Hand over what the training thread found at ``step``, replacing what was not asked for."""
        with self._changed:
            self._captured = {step: deltas}
            self._changed.notify_all()

    def obey(self, do: str, **said: Any) -> dict[str, Any]:
        """Do what rank 0 orders and say what came of it; raises what the store or the codec raises."""
        if do == "store":
            return self._store_part(Order(**said))
        if do == "move":
            self._move(**said)
        elif do == "republish":
            self._put(*self._kept[said["version"]])
        return {}

    def runs(self, names: Collection[str]) -> Iterator[Run]:
        """This rank's bits of the named tensors, in the order in which rank 0 expects them."""
        for piece in self.snapshot:
            if piece.name not in names:
                continue
            for first, size in cut_runs(piece.region.size, piece.dtype.itemsize):
                yield piece.name, piece.region, first, piece.bits[first : first + size]

    def _store_part(self, order: Order) -> dict[str, Any]:
        """Encode what was captured and store it; ordered again after a failure, it stores the same bytes."""
        if self._coded is None or self._coded.order != order:
            self._coded = self._encode(order)
        coded = self._coded
        if not coded.stored:
            self._put(coded.ref, coded.data)
            coded.stored = True
        ref = None if coded.ref is None else asdict(coded.ref)
        return {"object": ref, "codec": coded.codec, "sums": coded.sums}

    def _encode(self, order: Order) -> _Coded:
        deltas = self._take(order.step)
        header = DeltaHeader(order.run, order.version, order.version - 1, DEFAULT_CODEC)
        published, sums = self.snapshot.published(deltas)
        if not published:
            return _Coded(order, deltas, None, b"", header.codec, {})
        if self._codec == DEFAULT_CODEC:
            header = replace(header, codec=codec_without_base(published))
            data = encode_delta(header, published)
        else:
            header, data = encode_deltas_against(header, published, self.snapshot.bits, self._grid)
        return _Coded(order, deltas, object_ref(order.version, order.epoch, data), data, header.codec, sums)

    def _take(self, step: int) -> Mapping[Key, TensorDelta]:
        with self._changed:
            if not self._changed.wait_for(lambda: step in self._captured, HANDED_OVER):
                raise SyncTimeoutError(
                    f"step {step}", expected=f"captured within {HANDED_OVER:g} s", got=f"steps {[*self._captured]}"
                )
            return self._captured[step]

    def _put(self, ref: ObjectRef | None, data: bytes) -> None:
        if self._store is None:
            self._store = self._open_store()
        if ref is not None:
            self._store.put(ref.key, data)

    def _move(self, version: int) -> None:
        """The version is durable: the snapshot moves, and the object is held in case a replica can't read it."""
        coded = self._coded
        if coded is None or coded.order.version != version:
            return  # done already: rank 0 asks again when it was not told
        self.snapshot.apply(coded.deltas)
        self._coded, self._captured = None, {}
        self._kept[version] = (coded.ref, coded.data)
        while len(self._kept) > 1 and sum(len(data) for _, data in self._kept.values()) > KEPT_BYTES:
            self._kept.popitem(last=False)
