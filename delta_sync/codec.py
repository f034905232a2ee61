"""The contract every codec keeps, and the registry that finds one by the name in a file's header."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.dtypes import DType
from delta_sync.errors import FormatError
from delta_sync.limits import Limits
from delta_sync.tensor_delta import Encoding


@dataclass(frozen=True)
class Group:
    """Tensors that share an encoding and an element type, coded together.

    counts: changed elements of each tensor. sizes: elements of each tensor. label: names the group in errors.
    """

    label: str
    encoding: Encoding
    dtype: DType
    counts: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def changed(self) -> int:
        """Changed elements of all tensors together."""
        return sum(self.counts)


class Codec(ABC):
    """Turns a group's positions and values into byte streams and back, without loss.

    ``positions`` (int64) and ``values`` (carrier) are the tensors' arrays one after the other, ``[group.changed]``.
    """

    name: str

    @abstractmethod
    def stream_names(self, group: Group) -> tuple[str, ...]:
        """The streams that ``encode`` makes for such a group, in file order."""

    @abstractmethod
    def encode(self, group: Group, positions: npt.NDArray[np.int64], values: Bits) -> dict[str, bytes]:
        """The streams of one group."""

    @abstractmethod
    def unpack(self, group: Group, streams: Mapping[str, memoryview], limits: Limits) -> dict[str, bytes]:
        """What one group's streams hold, entropy coding undone.

        The streams may hold anything: FormatError unless each has a size that the group can have, which is checked
        before anything is allocated; none may hold more than ``limits.decoded_bytes``.
        """

    @abstractmethod
    def join(self, group: Group, contents: Mapping[str, bytes]) -> tuple[npt.NDArray[np.int64], Bits]:
        """Positions and values of one group, from what ``unpack`` gave.

        FormatError unless that is exactly the group, with positions that increase strictly within each tensor and no
        ULP step of zero. Allocates a small multiple of the result.
        """


_CODECS: dict[str, Codec] = {}


def register(codec: Codec) -> None:
    """Make a codec available to readers and writers under its name; a later one replaces an earlier one."""
    _CODECS[codec.name] = codec


def codec_named(name: str) -> Codec:
    """The codec registered under ``name``; FormatError if there is none."""
    codec = _CODECS.get(name)
    if codec is None:
        remedy = "upgrade delta-weight-sync on the reader"
        raise FormatError("codec", expected=f"one of {codec_names()}", got=repr(name), remedy=remedy)
    return codec


def codec_names() -> Sequence[str]:
    """Names of all registered codecs."""
    return sorted(_CODECS)
