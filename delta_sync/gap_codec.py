"""The codecs "gap8-ulp8-zstd" and "gap8-plane-zstd": streams by kind, each one zstd frame that suits an order-0 coder.

gap: positions (gaps.py). step, step_ext, sign: ULP steps (steps.py). plane0, plane1, ...: the bytes of raw values, or
of steps where most are long, the least significant first: at worst what the changed elements take as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.codec import Codec, Group, register
from delta_sync.errors import FormatError
from delta_sync.frames import compress, content_size, decompress
from delta_sync.gaps import decode_gaps, encode_gaps, longest
from delta_sync.limits import Limits
from delta_sync.steps import ESCAPE, decode_steps, encode_steps, sign_bytes
from delta_sync.tensor_delta import TensorDelta

DEFAULT_CODEC = "gap8-ulp8-zstd"
PLANE_CODEC = "gap8-plane-zstd"
_SAMPLE = 4096  # steps of a tensor that decide which of the two it would be smaller in


class GapCodec(Codec):
    """Byte gaps, with ULP steps split into size and sign, or with raw values as byte planes."""

    name = DEFAULT_CODEC
    splits_steps = True

    def stream_names(self, group: Group) -> tuple[str, ...]:
        """gap, then step, step_ext and sign, or one plane for each byte of the element type."""
        return "gap", *(("step", "step_ext", "sign") if self._splits(group) else _planes(group))

    def encode(self, group: Group, positions: npt.NDArray[np.int64], values: Bits) -> dict[str, bytes]:
        """The streams of one group."""
        coded = encode_steps(values, group.dtype) if self._splits(group) else _split(values, group)
        contents = (encode_gaps(positions, group.counts), *coded)
        names = self.stream_names(group)
        return {name: compress(content) for name, content in zip(names, contents, strict=True)}

    def unpack(self, group: Group, streams: Mapping[str, memoryview], limits: Limits) -> dict[str, bytes]:
        """See Codec."""
        names = self.stream_names(group)
        for name in names:
            _check_size(name, group, streams[name], limits)
        return {name: decompress(streams[name], _what(group, name)) for name in names}

    def join(self, group: Group, contents: Mapping[str, bytes]) -> tuple[npt.NDArray[np.int64], Bits]:
        """See Codec."""
        gap, *coded = (contents[name] for name in self.stream_names(group))
        positions = decode_gaps(gap, group.counts, group.sizes, f"{group.label} gaps")
        if self._splits(group):
            low, extension, signs = coded
            return positions, decode_steps(low, extension, signs, group.dtype, f"{group.label} steps")
        planes = np.stack([np.frombuffer(plane, np.uint8) for plane in coded], axis=1)
        values = planes.view(group.dtype.carrier).reshape(-1)
        if group.encoding == "ulp" and not values.all():
            raise FormatError(f"{group.label} steps", expected="no step of zero", got="one or more")
        return positions, values

    def _splits(self, group: Group) -> bool:
        return self.splits_steps and group.encoding == "ulp"


class PlaneCodec(GapCodec):
    """Byte gaps, with ULP steps or raw values as byte planes."""

    name = PLANE_CODEC
    splits_steps = False


def codec_without_base(deltas: Sequence[TensorDelta]) -> str:
    """Of the codecs that decode without old bits, the one in which these take fewer bytes, by a sample of the steps."""
    gain = 0.0  # of planes: an extension is as long as an element, and a size byte comes on top
    for delta in deltas:
        if delta.encoding == "ulp" and delta.changed:
            sample = delta.values[:: -(-delta.changed // _SAMPLE)]
            long = np.minimum(sample, ~sample + sample.dtype.type(1)) > ESCAPE
            width = delta.dtype.itemsize
            gain += delta.changed * (float(long.mean()) * width - (width - 1))
    return PLANE_CODEC if gain > 0 else DEFAULT_CODEC


def _check_size(name: str, group: Group, frame: memoryview, limits: Limits) -> None:
    """FormatError unless the frame declares a content size that the group can have."""
    size, count, width = content_size(frame, _what(group, name)), group.changed, group.dtype.itemsize
    least, most, unit = count, count, 1
    if name == "gap":
        most = min(longest(group.counts, group.sizes), limits.decoded_bytes)
    elif name == "step_ext":
        least, most, unit = 0, count * width, width
    elif name == "sign":
        least = most = sign_bytes(count)
    if not least <= size <= most or size % unit:
        expected = f"{most} bytes" if least == most else f"{least} to {most} bytes in units of {unit}"
        raise FormatError(_what(group, name), expected=f"{expected} of content", got=size)


def _what(group: Group, name: str) -> str:
    return f"{group.label} stream {name}"


def _planes(group: Group) -> tuple[str, ...]:
    return tuple(f"plane{k}" for k in range(group.dtype.itemsize))


def _split(values: Bits, group: Group) -> list[bytes]:
    return [plane.tobytes() for plane in values.view(np.uint8).reshape(-1, group.dtype.itemsize).T]


register(GapCodec())
register(PlaneCodec())
