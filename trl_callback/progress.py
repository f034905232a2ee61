"""A progress bar for what takes long, only where somebody watches."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from tqdm import tqdm

from delta_sync.anchor_files import Tensor


@contextmanager
def byte_bar(title: str, total: int, *, shown: bool | None) -> Iterator[Callable[[int], object]]:
    """Yield ``advance(bytes)``; the bar is on standard error, by default (``shown=None``) only on a terminal."""
    visible = sys.stderr.isatty() if shown is None else shown
    with tqdm(
        desc=title, total=total, unit="B", unit_scale=True, unit_divisor=1024, disable=not visible, leave=False
    ) as bar:
        yield bar.update


def counted(tensors: Iterable[Tensor], advance: Callable[[int], object]) -> Iterator[Tensor]:
    """The same tensors, calling ``advance`` with each one's bytes once it was taken."""
    for tensor in tensors:
        yield tensor
        advance(tensor[3].nbytes)
