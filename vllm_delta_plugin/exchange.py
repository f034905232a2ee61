"""The loop at the heart of a commit in host memory."""

from __future__ import annotations

from typing import Any

from delta_sync.jit import compiled


@compiled
def exchange(live: Any, index: Any, staged: Any) -> None:
    """Bits ``live[index]`` and ``staged`` (``[n]`` each, distinct places) change places."""
    for k in range(index.size):
        at = index[k]
        old = live[at]
        live[at] = staged[k]
        staged[k] = old
