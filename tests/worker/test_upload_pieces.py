"""Bytes that go up in pinned pieces: which bytes, and that no piece is filled while it may still be read.

On host memory, with events that note how they are used; on a GPU see gpu_kernel_cases.py.
"""

from __future__ import annotations

from queue import SimpleQueue

import numpy as np
import pytest
import torch

from vllm_delta_plugin import transfer


class Event:
    """One whose recorded work goes on reading its piece until somebody waits for it."""

    def __init__(self, piece: torch.Tensor) -> None:
        self.piece = piece
        self.read: torch.Tensor | None = None
        self.records = 0

    def record(self) -> None:
        self.read = self.piece.clone()
        self.records += 1

    def synchronize(self) -> None:
        assert self.read is None or torch.equal(self.piece, self.read), "filled again while it was still being read"
        self.read = None


def ring(count: int) -> transfer.Ring:
    made: transfer.Ring = SimpleQueue()
    for _ in range(count):
        piece = torch.zeros(transfer.PIECE, dtype=torch.uint8)
        made.put((piece, Event(piece)))
    return made


@pytest.mark.parametrize("count", [1, 2, 8])
def test_parts_come_where_they_belong_in_as_few_pieces_as_there_can_be(
    count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transfer, "PIECE", 64)
    random = np.random.default_rng(1)
    sizes = [0, 1, 16, 15, 200, 0, 64, 63, 65, 300]
    parts, at = [], 0
    for size in sizes:
        parts.append((at, random.integers(1, 255, size, np.uint8)))
        at += -(-size // 16) * 16
    pieces, target = ring(count), torch.zeros(at, dtype=torch.uint8)
    transfer.fill(target, parts, pieces)
    for begin, part in parts:
        np.testing.assert_array_equal(target.numpy()[begin : begin + len(part)], part)
    events = [pieces.get_nowait()[1] for _ in range(count)]
    for event in events:
        event.synchronize()
    assert pieces.empty() and sum(event.records for event in events) == -(-at // 64)


def test_a_piece_comes_back_when_its_use_fails() -> None:
    pieces = ring(1)
    with pytest.raises(ValueError, match="mapped"), transfer.taken(pieces):
        raise ValueError("not mapped")
    with transfer.taken(pieces) as (piece, _):
        assert piece.numel() == transfer.PIECE
