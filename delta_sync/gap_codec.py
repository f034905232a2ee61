"""The codec "gap8-ulp8-zstd": streams by kind, each a zstd frame that an order-0 coder does well on.

gap, gap_ext: positions (gaps.py). step, step_ext: ULP steps (steps.py). plane0, plane1, ...: the bytes of raw values,
least significant first.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.codec import Codec, Group, register
from delta_sync.errors import FormatError
from delta_sync.frames import compress, content_size, decompress
from delta_sync.gaps import decode_gaps, encode_gaps
from delta_sync.steps import decode_steps, encode_steps

DEFAULT_CODEC = "gap8-ulp8-zstd"
_MAX_GAP_EXTENSION = 8


class GapCodec(Codec):
    """Escape-coded byte gaps with zigzag ULP steps, or with raw values as byte planes."""

    name = DEFAULT_CODEC

    def stream_names(self, group: Group) -> tuple[str, ...]:
        """gap and gap_ext, then step and step_ext, or one plane for each byte of the element type."""
        if group.encoding == "ulp":
            return ("gap", "gap_ext", "step", "step_ext")
        return ("gap", "gap_ext", *_planes(group))

    def encode(self, group: Group, positions: npt.NDArray[np.int64], values: Bits) -> dict[str, bytes]:
        """The streams of one group."""
        if group.encoding == "ulp":
            contents = [*encode_gaps(positions, group.counts), *encode_steps(values, group.dtype)]
        else:
            planes = values.view(np.uint8).reshape(-1, group.dtype.itemsize)
            contents = [*encode_gaps(positions, group.counts), *(p.tobytes() for p in planes.T)]
        names = self.stream_names(group)
        return {name: compress(content) for name, content in zip(names, contents, strict=True)}

    def decode(self, group: Group, streams: Mapping[str, memoryview]) -> tuple[npt.NDArray[np.int64], Bits]:
        """Positions and values of one group; FormatError."""
        contents = self._contents(group, streams)
        where = f"{group.label} gaps"
        positions = decode_gaps(contents["gap"], contents["gap_ext"], group.counts, group.sizes, where)
        if group.encoding == "ulp":
            where = f"{group.label} steps"
            return positions, decode_steps(contents["step"], contents["step_ext"], group.dtype, where)
        planes = [np.frombuffer(contents[name], np.uint8) for name in _planes(group)]
        return positions, np.stack(planes, axis=1).view(group.dtype.carrier).reshape(-1)

    def _contents(self, group: Group, streams: Mapping[str, memoryview]) -> dict[str, bytes]:
        """Decompress; every size is checked before anything is allocated."""
        sizes = {}
        for name in self.stream_names(group):
            what = f"{group.label} stream {name}"
            sizes[name] = size = content_size(streams[name], what)
            unit, most = _bounds(name, group)
            if size % unit or size > most or (size != most and not name.endswith("_ext")):
                expected = f"{most} bytes of content" if unit == 0 else f"at most {most} bytes in units of {unit}"
                raise FormatError(what, expected=expected, got=size)
        return {name: decompress(streams[name], size, f"{group.label} stream {name}") for name, size in sizes.items()}


def _bounds(name: str, group: Group) -> tuple[int, int]:
    """Size unit and greatest size of a stream's content."""
    if name == "gap_ext":
        return 1, _MAX_GAP_EXTENSION * group.changed
    if name == "step_ext":
        return group.dtype.itemsize, group.dtype.itemsize * group.changed
    return 1, group.changed


def _planes(group: Group) -> tuple[str, ...]:
    return tuple(f"plane{k}" for k in range(group.dtype.itemsize))


register(GapCodec())
