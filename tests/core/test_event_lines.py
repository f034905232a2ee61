"""Lines of an event stream, in whatever pieces they come."""

from __future__ import annotations

import itertools

import pytest

from delta_sync.errors import FormatError
from delta_sync.event_lines import event_lines

TEXT = 'event: a\r\ndata: {"é": "\u2028 \u2029 \x85 \x0b \x0c \x1c"}\n\n: ping\n\r\nunfinished'
LINES = ["event: a", 'data: {"é": "\u2028 \u2029 \x85 \x0b \x0c \x1c"}', "", ": ping", ""]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_only_lf_ends_a_line(size: int) -> None:
    data = TEXT.encode()
    chunks = (data[at : at + size] for at in range(0, len(data), size))
    assert list(event_lines(chunks, limit=100)) == LINES


def test_a_line_without_end_is_not_collected() -> None:
    taken = itertools.count()
    chunks = (b"x" * 10 for _ in taken)
    with pytest.raises(FormatError, match="lines of at most 100 bytes"):
        next(event_lines(chunks, limit=100))
    assert next(taken) == 11
