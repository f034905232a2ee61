"""The safetensors container: named byte streams and string metadata in one file, parsed with suspicion.

safetensors' own loader also reads these files; this parser adds caps, and rejects duplicate keys, holes and overlaps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NoReturn

from delta_sync.errors import FormatError
from delta_sync.limits import Limits

if TYPE_CHECKING:
    from delta_sync.anchor_files import Tensor

_LENGTH_BYTES = 8
_SURROGATE = re.compile("[\ud800-\udfff]")


def write_container(metadata: Mapping[str, str], streams: Mapping[str, bytes]) -> bytes:
    """One safetensors file: ``metadata`` in its header, each stream a flat U8 tensor, in the given order.

    FormatError if the metadata is not all Unicode strings.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    at = 0
    for name, data in streams.items():
        header[name] = {"dtype": "U8", "shape": [len(data)], "data_offsets": [at, at + len(data)]}
        at += len(data)
    _metadata(header["__metadata__"])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *streams.values()])


def write_tensors(metadata: Mapping[str, str], tensors: Iterable[Tensor]) -> bytes:
    """One safetensors file of (name, dtype, shape, bits ``[n]``), in the given order; FormatError as above."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    parts, at = list[bytes](), 0
    for name, kind, shape, bits in tensors:
        parts.append(bits.tobytes())
        header[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": [at, at := at + len(parts[-1])]}
    _metadata(header["__metadata__"])
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return b"".join([len(text).to_bytes(_LENGTH_BYTES, "little"), text, *parts])


def read_container(data: bytes | memoryview, limits: Limits) -> tuple[dict[str, str], dict[str, memoryview]]:
    """The metadata and streams of a file that ``write_container`` could have made; FormatError otherwise."""
    view = memoryview(data)
    if len(view) > limits.object_bytes:
        raise FormatError("delta object", expected=f"at most {limits.object_bytes} bytes", got=len(view))
    if len(view) < _LENGTH_BYTES:
        raise FormatError("delta object", expected=f"at least {_LENGTH_BYTES} bytes", got=len(view))
    length = int.from_bytes(view[:_LENGTH_BYTES], "little")
    room = min(limits.header_bytes, len(view) - _LENGTH_BYTES)
    if length > room:
        raise FormatError("header length", expected=f"at most {room} bytes", got=length)
    body = view[_LENGTH_BYTES + length :]
    header = parse_json(view[_LENGTH_BYTES : _LENGTH_BYTES + length], "safetensors header")
    if not isinstance(header, dict):
        raise FormatError("safetensors header", expected="a JSON object", got=type(header).__name__)
    return _metadata(header.pop("__metadata__", None)), _streams(header, body)


def parse_json(text: bytes | memoryview | str, what: str) -> Any:
    """JSON without duplicate keys, NaN or bottomless nesting; FormatError naming ``what``."""
    try:
        return json.loads(
            text if isinstance(text, str) else str(text, "utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
    except (ValueError, RecursionError) as error:
        raise FormatError(what, expected="plain JSON in UTF-8", got=f"{type(error).__name__}: {error}") from None


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise FormatError("JSON object", expected="unique keys", got=f"{twice[:100]!r} twice")
    return result


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _metadata(value: object) -> dict[str, str]:
    strings = [*value.keys(), *value.values()] if isinstance(value, dict) else [None]
    if not isinstance(value, dict) or not all(isinstance(s, str) and is_text(s) for s in strings):
        raise FormatError("__metadata__", expected="a JSON object of Unicode strings", got=ascii(value)[:100])
    return value


def _streams(header: dict[str, Any], body: memoryview) -> dict[str, memoryview]:
    """Slice the body; the streams must cover it without holes or overlaps, in header order."""
    streams, at = {}, 0
    for name, entry in header.items():
        size = _stream_size(name, entry, at)
        if size > len(body) - at:
            raise FormatError(f"stream {name[:100]!r}", expected=f"to end by byte {len(body)}", got=at + size)
        streams[name] = body[at : at + size]
        at += size
    if at != len(body):
        raise FormatError("delta object", expected=f"{at} bytes of streams", got=f"{len(body)}")
    return streams


def _stream_size(name: str, entry: object, at: int) -> int:
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"} or entry["dtype"] != "U8":
        raise FormatError(f"stream {name[:100]!r}", expected="a U8 tensor entry", got=repr(entry)[:100])
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not is_sizes(shape) or len(shape) != 1 or not is_sizes(offsets) or offsets != [at, at + shape[0]]:
        expected = f"shape [n] and data_offsets [{at}, {at} + n]"
        raise FormatError(f"stream {name[:100]!r}", expected=expected, got=repr(entry)[:100])
    return int(shape[0])


def is_sizes(value: object) -> bool:
    """Whether a JSON value is a list of integers that are not negative (and not booleans)."""
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def is_text(value: str) -> bool:
    """Whether a string can be written as UTF-8: JSON's escapes can smuggle in lone surrogates."""
    return _SURROGATE.search(value) is None
