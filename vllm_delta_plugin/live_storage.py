"""Live weights seen as flat arrays of bits, on CPU or GPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.dtypes import DTYPES, DType
from delta_sync.errors import MappingError
from vllm_delta_plugin.transfer import to_device, to_host

Array = npt.NDArray[Any]

HAS_TRITON = find_spec("triton") is not None
_DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float8_e4m3fn: "F8_E4M3"}
SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def element_type(dtype: torch.dtype) -> DType | None:
    """The format's element type for a torch dtype that can be served from; None if it is not supported."""
    name = _DTYPES.get(dtype)
    return DTYPES[name] if name else None


@dataclass(frozen=True, eq=False)
class LiveStorage:
    """One parameter's whole storage; ``bits`` is a flat signed-integer tensor over the same memory, never a copy."""

    owner: str
    dtype: DType
    bits: torch.Tensor

    @property
    def on_cpu(self) -> bool:
        """Whether compiled CPU kernels can reach the memory."""
        return self.bits.device.type == "cpu"

    @property
    def array(self) -> Array:
        """The live memory itself as the dtype's unsigned carrier; only on CPU."""
        return self.bits.numpy().view(self.dtype.carrier)

    def read(self, index: npt.NDArray[np.int64]) -> Array:
        """Copy the live bits at ``index`` (int64 ``[n]``) to host memory, as the unsigned carrier ``[n]``."""
        if self.on_cpu:
            return self.array[index]
        at = to_device(index, self.bits.device)
        return to_host(self.bits[at]).view(self.dtype.carrier)

    def read_box(self, shape: tuple[int, ...], offset: int, strides: tuple[int, ...]) -> Array:
        """Copy an affine box of live bits to host memory, contiguous ``[numel]``, as the unsigned carrier."""
        view = self.bits.as_strided(shape, strides, offset)
        return to_host(view.reshape(-1)).view(self.dtype.carrier)


def live_storage(owner: str, tensor: torch.Tensor) -> LiveStorage:
    """View the storage under ``tensor`` as bits; MappingError if its element type or device cannot be served from."""
    dtype = element_type(tensor.dtype)
    if dtype is None or tensor.device.type not in ("cpu", "cuda"):
        raise MappingError(
            f"parameter {owner!r}",
            expected=f"{', '.join(_DTYPES.values())} on cpu or cuda",
            got=f"{tensor.dtype} on {tensor.device.type}",
            remedy="serve unquantised weights",
        )
    signed = SIGNED[dtype.itemsize]
    storage = tensor.untyped_storage()
    bits = torch.empty(0, dtype=signed, device=tensor.device)
    bits.set_(storage, 0, (storage.nbytes() // dtype.itemsize,), (1,))
    return LiveStorage(owner, dtype, bits)


def model_device(storages: Sequence[LiveStorage]) -> torch.device:
    """Where the model runs: where all storages are but the shadows in host memory."""
    return next((storage.bits.device for storage in storages if not storage.on_cpu), torch.device("cpu"))
