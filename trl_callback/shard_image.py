"""One rank's share of a model as the server should hold it: pieces of checkpoint tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import nn

from delta_sync.dtypes import DType
from trl_callback.adapters import Adapters
from trl_callback.layout import Cut, Region, Shape, cut, flattened, sources, whole
from trl_callback.serving_image import ServingImage, Source
from trl_callback.shards import Held, held
from trl_callback.supported import check_adapters


@dataclass(frozen=True)
class Piece:
    """Elements ``region`` of one checkpoint tensor of ``shape``, where and as the trainer holds them."""

    source: Source
    shape: Shape
    region: Region

    @property
    def name(self) -> str:
        """The checkpoint tensor's."""
        return self.source.name

    @property
    def dtype(self) -> DType:
        """The element type that is served."""
        return self.source.dtype


class ShardImage(ServingImage):
    """Walks this rank's shards, not cast yet.

    The pieces of all ``ranks`` together are the whole model, each element once; no rank needs another's.
    Raises MappingError, naming the tensor, for what can't be published exactly.
    """

    shards_allowed = True

    def __init__(self, model: nn.Module, serving_dtype: Callable[[str], str], rank: int, ranks: int) -> None:
        super().__init__(model, serving_dtype)
        self._rank, self._ranks = rank, ranks
        self._cuts: dict[str, list[tuple[str, Shape, Cut]]] = {}  # by in-memory name; a layout never changes

    def pieces(self) -> Iterator[Piece]:
        """This rank's pieces, in the model's order."""
        adapters = Adapters(self._model)
        check_adapters(self._model, adapters)  # one that came later would be left out of its layer's shards
        for share in held(self._model, self._rank, self._ranks):
            if share.is_whole and not share.flat:
                for name, part in self._checkpoint_tensors(adapters, share.name, share.local).items():
                    source = self._source(name, part)
                    yield Piece(source, source.shape, whole(source.shape))
                continue
            for name, shape, where in self._cuts_of(share):
                yield Piece(self._source(name, where.of(share.local)), shape, where.region)

    def _cuts_of(self, share: Held) -> list[tuple[str, Shape, Cut]]:
        if share.name not in self._cuts:
            found = []
            for source in sources(self._model, share.name, share.full):
                where = cut(flattened(source) if share.flat else source, share.shape, share.box)
                if where is not None:
                    found.append((source.name, source.shape, where))
            self._cuts[share.name] = found
        return self._cuts[share.name]
