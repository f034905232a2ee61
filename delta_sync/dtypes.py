"""Element types, named as safetensors names them, and the unsigned integers that carry their bits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from delta_sync.errors import FormatError


@dataclass(frozen=True)
class DType:
    """An element type: safetensors name, width in bytes, and how its bits order.

    ``order`` is "float" (sign-magnitude), "int" (two's complement) or "uint".
    """

    name: str
    itemsize: int
    order: str

    @property
    def carrier(self) -> np.dtype[np.unsignedinteger]:
        """The numpy unsigned integer type that carries one element's bits."""
        return np.dtype(f"<u{self.itemsize}")


DTYPES = {
    d.name: d
    for d in (
        DType("BF16", 2, "float"),
        DType("F16", 2, "float"),
        DType("F32", 4, "float"),
        DType("F8_E4M3", 1, "float"),
        DType("F8_E5M2", 1, "float"),
        DType("I8", 1, "int"),
        DType("U8", 1, "uint"),
    )
}


def dtype(name: str) -> DType:
    """Look an element type up by its safetensors name; FormatError if it is not supported."""
    try:
        return DTYPES[name]
    except (KeyError, TypeError):
        raise FormatError("element type", expected=f"one of {sorted(DTYPES)}", got=repr(name)) from None
