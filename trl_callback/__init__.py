"""The trainer's side: publish every step's weights, and wait for rollouts that use them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl_callback.attaching import attach
    from trl_callback.callback import DeltaSyncCallback
    from trl_callback.config import DeltaSyncConfig

__all__ = ["DeltaSyncCallback", "DeltaSyncConfig", "attach"]

_HOMES = {"DeltaSyncCallback": "callback", "DeltaSyncConfig": "config", "attach": "attaching"}


def __getattr__(name: str) -> Any:
    """Import on first use: torch and transformers take seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
