"""zstd frames whose decompressed size is known and bounded before a byte is allocated."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt
import zstandard

from delta_sync.errors import FormatError

LEVEL = 1
# A block is at least 4 bytes and yields at most 128 KiB, so no honest frame expands further.
_MAX_EXPANSION = 2**15


_kept = threading.local()  # one (de)compressor of each kind a thread: making one takes longer than a small frame


def compress(data: bytes, level: int = LEVEL) -> bytes:
    """One zstd frame that declares its content size; nothing at all for no content."""
    if not data:
        return b""
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


def compress_symbols(data: bytes | npt.NDArray[np.uint8]) -> bytes:
    """Like ``compress``, for bytes that are independent of each other: looks for (almost) no repetitions in them.

    Short chance repetitions, which any level would take, cost more than the entropy coder needs (measured: 5 %).
    """
    if not len(data):
        return b""
    if not hasattr(_kept, "symbols"):
        how = zstandard.ZstdCompressionParameters(
            strategy=zstandard.STRATEGY_FAST, window_log=17, hash_log=6, min_match=7, write_content_size=True
        )
        _kept.symbols = zstandard.ZstdCompressor(compression_params=how)
    frame: bytes = _kept.symbols.compress(data)
    return frame


def _decompressor() -> zstandard.ZstdDecompressor:
    if not hasattr(_kept, "decompressor"):
        _kept.decompressor = zstandard.ZstdDecompressor()
    found: zstandard.ZstdDecompressor = _kept.decompressor
    return found


def content_size(frame: memoryview, what: str) -> int:
    """How many bytes a frame declares to hold, checked against what its length could yield; FormatError."""
    if not len(frame):
        return 0
    try:
        size = zstandard.frame_content_size(frame)
    except zstandard.ZstdError as error:
        raise FormatError(what, expected="a zstd frame", got=str(error)) from None
    most = len(frame) * _MAX_EXPANSION
    if not 0 < size <= most:
        got = "none" if size <= 0 else size
        raise FormatError(what, expected=f"a declared content size of at most {most} bytes", got=got)
    return int(size)


def decompress(frame: memoryview, what: str) -> bytes:
    """The content of one frame, of exactly the size it declares; FormatError."""
    size = content_size(frame, what)
    if not size:
        return b""
    try:
        content = _decompressor().decompress(frame, max_output_size=size, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FormatError(what, expected="one intact zstd frame", got=str(error)) from None
    if len(content) != size:
        raise FormatError(what, expected=f"{size} bytes of content", got=len(content))
    return content
