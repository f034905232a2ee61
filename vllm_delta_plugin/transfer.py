"""Between host and GPU through a few pinned pieces: a large pageable copy makes the engine wait to launch its kernels.

An older revision on an H200: beside a pageable upload of 48 MB a step of 2.7 ms took 7.5, beside one in pinned pieces
2.8. The pieces are made once, so that none is pinned while streams run. Copies on the host are NumPy's: torch's may
start a thread a core.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from queue import SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

PIECE = 1 << 22  # bytes
PIECES = 8  # of a GPU, 32 MiB; who needs one more waits until the oldest is read
_ALIGNED = 16  # bytes; where each of several arrays in one allocation begins

Part = tuple[int, npt.NDArray[np.uint8]]  # where in the target it begins, and what it is
Ring = SimpleQueue[tuple[torch.Tensor, Any]]  # pieces (uint8 ``[PIECE]``), each with an event; the oldest first


def to_device(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """A copy of flat ``array`` (signed integers ``[n]``) on ``device``, under way on the current stream."""
    source = np.ascontiguousarray(array)
    target = torch.empty(source.size, dtype=torch.from_numpy(source).dtype, device=device)
    send(source, target)
    return target


def send(source: npt.NDArray[Any], target: torch.Tensor) -> None:
    """Copy flat ``source`` to flat ``target`` of the same size and type, under way on the current stream."""
    _fill(target.view(torch.uint8), [(0, source.view(np.uint8))])


def together_to_device(parts: Sequence[bytes], device: torch.device) -> list[torch.Tensor]:
    """Copies of ``parts`` as uint8 tensors in one allocation on ``device``, under way on the current stream."""
    begins, end = [], 0
    for part in parts:
        begins.append(end)
        end += -(-len(part) // _ALIGNED) * _ALIGNED
    memory = torch.empty(end, dtype=torch.uint8, device=device)
    _fill(memory, [(begin, np.frombuffer(part, np.uint8)) for begin, part in zip(begins, parts, strict=True)])
    return [memory[begin : begin + len(part)] for begin, part in zip(begins, parts, strict=True)]


def to_host(tensor: torch.Tensor) -> npt.NDArray[Any]:
    """A copy of a flat tensor (signed integers ``[n]``) in host memory, as of the current stream."""
    if tensor.device.type == "cpu":
        return tensor.numpy().copy()
    target, source = torch.empty(tensor.shape, dtype=tensor.dtype).numpy(), tensor.contiguous().view(torch.uint8)
    with torch.cuda.device(tensor.device):
        for cut in _cuts(source.numel()):
            with taken(ring_of(tensor.device)) as (pinned, event):
                here = pinned[: cut.stop - cut.start]
                here.copy_(source[cut], non_blocking=True)
                event.record()
                event.synchronize()
                np.copyto(target.view(np.uint8)[cut], here.numpy())
    return target


def _fill(target: torch.Tensor, parts: Sequence[Part]) -> None:
    if target.device.type == "cpu":
        for begin, part in parts:
            np.copyto(target[begin : begin + len(part)].numpy(), part)
        return
    with torch.cuda.device(target.device):
        fill(target, parts, ring_of(target.device))


def fill(target: torch.Tensor, parts: Sequence[Part], ring: Ring) -> None:
    """Copy each part to the bytes of ``target`` from where it says, by way of the ring; in between may be anything."""
    for cut in _cuts(target.numel()):
        with taken(ring) as (pinned, event):
            for begin, part in parts:
                low, high = max(cut.start, begin), min(cut.stop, begin + len(part))
                if low < high:
                    np.copyto(pinned.numpy()[low - cut.start : high - cut.start], part[low - begin : high - begin])
            target[cut].copy_(pinned[: cut.stop - cut.start], non_blocking=True)
            event.record()


@contextmanager
def taken(ring: Ring) -> Iterator[tuple[torch.Tensor, Any]]:
    """A piece that nothing reads any more, and the event to record, on the stream that does, after its last use."""
    piece, event = ring.get()
    try:
        event.synchronize()  # returns at once if it was never recorded
        yield piece, event
    finally:
        ring.put((piece, event))


@cache
def ring_of(device: torch.device) -> Ring:
    """The pieces of a GPU; pins them when it is first asked for."""
    ring: Ring = SimpleQueue()
    with torch.inference_mode(False), torch.cuda.device(device):  # else none could be written to outside of that mode
        for _ in range(PIECES):
            event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]  # who waits needs no core
            ring.put((torch.empty(PIECE, dtype=torch.uint8, pin_memory=True), event))
    return ring


def _cuts(count: int) -> Iterator[slice]:
    """Slices of at most PIECE that make up ``count`` bytes."""
    for at in range(0, count, PIECE):
        yield slice(at, min(count, at + PIECE))
