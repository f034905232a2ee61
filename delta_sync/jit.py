"""Compiling the element loops."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from hashlib import blake2b
from pathlib import Path
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
    kept = getattr(dispatcher, "_cache", None)
    for name in ("load_overload", "save_overload"):
        if hasattr(kept, name):
            setattr(kept, name, _if_possible(getattr(kept, name)))
    file = getattr(kept, "_cache_file", None)
    if file is not None and hasattr(file, "_source_stamp"):
        file._source_stamp = (file._source_stamp, _sources())
    return cast(Function, dispatcher)


@cache
def _sources() -> str:
    """A hash of the files with compiled loops: what numba keeps is used while all are the same.

    Numba itself looks at the file of a loop only, and not at those of functions that are compiled into it: after an
    upgrade it would go on with the old ones.
    """
    sources = (path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
    return blake2b(b"".join(source for source in sources if b"delta_sync.jit" in source)).hexdigest()


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
