"""Delta objects made by hand, so that a test can lie in any one place."""

from __future__ import annotations

import json

import numpy as np
import zstandard

from delta_sync import DEFAULT_CODEC


def frame(content: bytes) -> bytes:
    """What a stream with this content looks like in a file."""
    return zstandard.ZstdCompressor(level=1).compress(content) if content else b""


def row(name="w", shape=(100,), count=3) -> list:
    return [name, list(shape), count]


def group(*rows, encoding="ulp", dtype="BF16", **more) -> dict:
    return {"encoding": encoding, "dtype": dtype, "tensors": list(rows) or [row()], **more}


def metadata(*groups, **changes) -> dict:
    """An honest header for ``groups``, with ``changes``; None removes a key."""
    honest = {
        "format": "delta-sync",
        "format_version": "1",
        "codec": DEFAULT_CODEC,
        "run": "run",
        "version": "7",
        "base_version": "6",
        "groups": json.dumps(list(groups) or [group()]),
    }
    return {key: value for key, value in (honest | changes).items() if value is not None}


def contents(gap=b"\0\1\2", step=b"\0\0\1", step_ext=b"", sign=b"\2") -> dict[str, bytes]:
    """Stream contents of a ULP group: positions 0, 2, 5 and steps +1, -1, +2 unless told otherwise."""
    return {"0.gap": gap, "0.step": step, "0.step_ext": step_ext, "0.sign": sign}


def framed(streams: dict[str, bytes], **replaced: bytes) -> dict[str, bytes]:
    """Compressed streams, some replaced by bytes taken as they are (keys with _ for the first dot)."""
    frames = {name: frame(content) for name, content in streams.items()}
    return frames | {f"0.{name}": data for name, data in replaced.items()}


def container(header: object, body: bytes = b"", length: int | None = None) -> bytes:
    """A safetensors file with any header (text or JSON value), body and header length."""
    text = header.encode("utf-8", "surrogatepass") if isinstance(header, str) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, "little") + text + body


def entries(streams: dict[str, bytes]) -> dict[str, dict]:
    """Honest safetensors entries for streams that follow each other."""
    ends = np.cumsum([0, *map(len, streams.values())]).tolist()
    return {
        name: {"dtype": "U8", "shape": [b - a], "data_offsets": [a, b]}
        for name, a, b in zip(streams, ends, ends[1:], strict=False)
    }


def delta_object(meta: dict | None = None, streams: dict[str, bytes] | None = None, **changed_entries) -> bytes:
    """One file from metadata and frames; ``changed_entries`` replace parts of a stream's safetensors entry."""
    streams = framed(contents()) if streams is None else streams
    table = entries(streams)
    for name, change in changed_entries.items():
        table[f"0.{name}"] |= change
    return container({"__metadata__": metadata() if meta is None else meta, **table}, b"".join(streams.values()))
