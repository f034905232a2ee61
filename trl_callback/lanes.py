"""CUDA streams, and nothing at all where tensors are in host memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Lane:
    """One stream of a device: the current one, or a new one ``beside`` it. Without a GPU, work is done at once."""

    def __init__(self, device: torch.device, *, beside: bool = False) -> None:
        self._stream: Any = None
        if device.type == "cuda":
            new = torch.cuda.Stream(device) if beside else None  # type: ignore[no-untyped-call]
            self._stream = new or torch.cuda.current_stream(device)

    @contextmanager
    def work(self) -> Iterator[None]:
        """What is done inside happens on this stream."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def mark(self) -> Mark:
        """The point that this stream's work has reached."""
        event: Any = None
        if self._stream is not None:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return Mark(event)

    def after(self, mark: Mark) -> None:
        """What comes now on this stream waits for ``mark``."""
        if self._stream is not None:
            self._stream.wait_event(mark.event)


class Mark:
    """A point of a stream's work."""

    def __init__(self, event: Any) -> None:
        self.event = event

    def wait(self) -> None:
        """Return once the stream has passed it."""
        if self.event is not None:
            self.event.synchronize()
