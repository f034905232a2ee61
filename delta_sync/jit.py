"""Compiling the element loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., object])


def compiled(function: Function) -> Function:
    """Compile a loop over numpy arrays, without the GIL, kept on disk where a cache can be written.

    Numba refuses at import time to cache a function for which it finds no writable folder (a read-only
    install, no home): such a process compiles anew instead.
    """
    try:
        return cast(Function, numba.njit(function, cache=True, nogil=True))
    except RuntimeError:
        return cast(Function, numba.njit(function, nogil=True))


def inlined(function: Function) -> Function:
    """Compile a part of such loops into each loop that calls it: for what is called at each element or block."""
    return cast(Function, numba.njit(function, nogil=True, forceinline=True))
