"""Seam: vLLM 0.32 on CPU looks into every loaded module for kernels, and dies on llvmlite's library object.

``_rebind_kernels`` asks every module attribute for its ``__dict__``; llvmlite (which numba loads) answers any name
with a C function, also that one. Importing numba before a worker starts is therefore fatal without this.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_NAME = "_rebind_kernels"


def install() -> None:
    """Make llvmlite's library object deny dunder names before vLLM scans; does nothing where vLLM does not scan."""
    try:
        from vllm.triton_utils import dispatcher
    except ImportError:
        return
    original = getattr(dispatcher, _NAME, None)
    if original is None or getattr(original, "__delta_sync_wraps__", False):
        return

    @functools.wraps(original)
    def careful(*args: Any) -> Any:
        _deny_dunders()
        return original(*args)

    careful.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    setattr(dispatcher, _NAME, careful)


def _deny_dunders() -> None:
    ffi = sys.modules.get("llvmlite.binding.ffi")
    kind = type(getattr(ffi, "lib", None))
    original = vars(kind).get("__getattr__")
    if original is None or getattr(original, "__delta_sync_wraps__", False):
        return

    def lookup(self: Any, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return original(self, name)

    lookup.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    setattr(kind, "__getattr__", lookup)  # noqa: B010 - a class attribute that type checkers do not know
