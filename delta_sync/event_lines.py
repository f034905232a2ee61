"""Lines of an event stream (text/event-stream), which holds JSON."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from delta_sync.errors import FormatError


def event_lines(chunks: Iterable[bytes], limit: int) -> Iterator[str]:
    """Each whole line of UTF-8, without the LF or CR LF that ends it; FormatError for one of more than ``limit`` bytes.

    httpx's ``iter_lines`` ends lines at U+2028, U+0085 and the like too, which JSON may hold as they are.
    """
    line = bytearray()
    for chunk in chunks:
        first, *others = chunk.split(b"\n")
        line += first
        for other in others:
            yield line.removesuffix(b"\r").decode(errors="replace")
            line = bytearray(other)
        if len(line) > limit:
            raise FormatError("event stream", expected=f"lines of at most {limit} bytes", got="a longer one")
