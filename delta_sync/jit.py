"""Compiling the element loops."""

from __future__ import annotations

from collections.abc import Callable
from pickle import UnpicklingError
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a loop over numpy arrays, without the GIL, kept on disk where a cache can be written.

    Numba refuses at import time to cache a function for which it finds no writable folder (a read-only
    install, no home): such a process compiles anew instead. So does one whose disk is full, or whose cache is damaged:
    Numba would raise that out of the first call, in the middle of whatever needs the loop.
    """
    try:
        dispatcher: Any = numba.njit(function, cache=True, nogil=True)
    except RuntimeError:
        return cast(Function, numba.njit(function, nogil=True))
    for name in ("load_overload", "save_overload"):
        if hasattr(getattr(dispatcher, "_cache", None), name):
            setattr(dispatcher._cache, name, _if_possible(getattr(dispatcher._cache, name)))
    return cast(Function, dispatcher)


def _if_possible(use: Callable[..., Any]) -> Callable[..., Any]:
    def tried(*args: Any) -> Any:
        try:
            return use(*args)
        except (OSError, EOFError, UnpicklingError):
            return None  # as where there is no cache

    return tried


def inlined(function: Function) -> Function:
    """Compile a part of such loops into each loop that calls it: for what is called at each element or block."""
    return cast(Function, numba.njit(function, nogil=True, forceinline=True))
