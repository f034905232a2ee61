"""A model's weights as the server should hold them: checkpoint names, serving element types, bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from delta_sync.delta import diff
from delta_sync.dtypes import DType, dtype
from delta_sync.errors import MappingError
from delta_sync.rounding import diff_rounded
from delta_sync.tensor_delta import TensorDelta
from trl_callback.adapters import Adapters
from trl_callback.extract import SIGNED, TORCH_DTYPES
from trl_callback.supported import check_model, unwrap

NAMES = {torch_dtype: name for name, torch_dtype in TORCH_DTYPES.items()}
WRAPPERS = ("_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "_orig_mod.")


@dataclass(frozen=True)
class ImageTensor:
    """One checkpoint tensor; ``bits`` is flat, C order, and may share the model's memory: copy it to keep it."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    bits: npt.NDArray[np.unsignedinteger]


@dataclass(frozen=True)
class Source:
    """One checkpoint tensor where the trainer holds it, in the trainer's own precision; ``dtype`` is what is served."""

    name: str
    dtype: DType
    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Its sizes."""
        return tuple(self.tensor.shape)

    def cast(self) -> ImageTensor:
        """Its bits as served, in host memory."""
        served = self.tensor.to(TORCH_DTYPES[self.dtype.name])  # cast first: half the bytes leave a GPU
        bits = served.to("cpu").contiguous().view(SIGNED[self.dtype.itemsize]).numpy().view(self.dtype.carrier)
        return ImageTensor(self.name, self.dtype, self.shape, bits.reshape(-1))

    def changes(self, held: npt.NDArray[np.unsignedinteger], shape: tuple[int, ...]) -> TensorDelta:
        """What turns ``held``, the flat bits last published, into this tensor as served; positions are in ``shape``."""
        if (self.dtype.name, self.tensor.dtype, self.tensor.device.type) == ("BF16", torch.float32, "cpu"):
            delta = diff_rounded(self.name, shape, held, self.tensor.numpy())  # no copy: half of a capture's time
            if delta is not None:
                return delta
        return diff(self.name, self.dtype, shape, held, self.cast().bits)


class ServingImage:
    """Walks a model tensor by tensor, cast to what is served, never holding more than one cast parameter.

    ``merge``: with its adapters' part, else the weights below them.
    ``serving_dtype(name) -> "BF16" | "F16" | "F32"`` is asked for every checkpoint tensor.
    Raises MappingError, naming the tensor, for what can't be published exactly.
    """

    shards_allowed = False

    def __init__(self, model: nn.Module, serving_dtype: Callable[[str], str], *, merge: bool = True) -> None:
        self._model = unwrap(model)
        self._serving_dtype = serving_dtype
        self._merge = merge
        self._kept: set[str] = set()  # in-memory names known to be checkpoint names already
        check_model(self._model, shards_allowed=self.shards_allowed)

    def __iter__(self) -> Iterator[ImageTensor]:
        """Every tensor once, in the model's order; tied weights under their first name only."""
        for source in self.sources():
            yield source.cast()

    def sources(self) -> Iterator[Source]:
        """The same tensors, not cast yet, where the model has them."""
        adapters = Adapters(self._model)  # of now: they may come and go between captures
        for memory_name, tensor in (*stored_parameters(self._model), *stored_buffers(self._model)):
            for name, part in self._checkpoint_tensors(adapters, memory_name, tensor.detach()).items():
                yield self._source(name, part)

    @property
    def device(self) -> torch.device:
        """Where the model's first parameter is."""
        return next((parameter.device for parameter in self._model.parameters()), torch.device("cpu"))

    def _checkpoint_tensors(self, adapters: Adapters, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """What is saved of one stored tensor, with its adapters merged unless they are left out."""
        if self._merge:
            tensor = adapters.merged(name, tensor)
        if name in self._kept or not isinstance(self._model, PreTrainedModel):
            return {name: tensor}
        try:
            parts = checkpoint_tensors(self._model, name, tensor)
        except Exception as error:
            raise MappingError(
                f"parameter {name!r}",
                expected="a name and layout that transformers can turn back into its checkpoint's",
                got=repr(error),
                remedy=f"publish a model other than {type(self._model).__name__}, or report it",
            ) from error
        found = sum(part.numel() for part in parts.values())
        if found != tensor.numel():
            raise MappingError(
                f"parameter {name!r}", expected=f"{tensor.numel()} elements", got=f"{found} in {[*parts]}"
            )
        if list(parts) == [name] and parts[name] is tensor:
            self._kept.add(name)
        return parts

    def _source(self, name: str, tensor: torch.Tensor) -> Source:
        served = self._serving_dtype(name)
        if served not in TORCH_DTYPES:
            raise MappingError(f"tensor {name!r}", expected=f"served as one of {sorted(TORCH_DTYPES)}", got=served,
                               remedy="serve unquantised weights")  # fmt: skip
        return Source(name, dtype(served), tensor)


def checkpoint_tensors(model: PreTrainedModel, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What transformers saves of one stored tensor; raises whatever its conversion does."""
    with own_classes(model):
        parts: dict[str, torch.Tensor] = revert_weight_conversion(model, {name: tensor})
    return parts


@contextmanager
def own_classes(model: nn.Module) -> Iterator[None]:
    """FSDP2 gives modules classes of its own, derived from theirs; transformers goes by the names of theirs."""
    sharded: list[nn.Module] = [module for module in model.modules() if isinstance(module, FSDPModule)]
    classes = [type(module) for module in sharded]
    try:
        for module in sharded:
            module.__class__ = own_class(module)
        yield
    finally:
        for module, kind in zip(sharded, classes, strict=True):
            module.__class__ = kind


def own_class(module: nn.Module) -> type[nn.Module]:
    """A module's class before FSDP2."""
    kind = type(module)
    return kind.__bases__[-1] if issubclass(kind, FSDPModule) else kind


def stored_parameters(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters under their in-memory names, each storage-sharing object once, those of adapters left out."""
    adapters = Adapters(model)
    for name, parameter in model.named_parameters():
        if (plain := adapters.plain_name(plain_name(name))) is not None:
            yield plain, parameter


def stored_buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Persistent buffers, in the same way."""
    transient, adapters = _transient_buffers(model), Adapters(model)
    for name, buffer in model.named_buffers():
        if name not in transient and (plain := adapters.plain_name(plain_name(name))) is not None:
            yield plain, buffer.detach()


def _transient_buffers(model: nn.Module) -> set[str]:
    return {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules(remove_duplicate=False)
        for name in module._non_persistent_buffers_set
    }


def plain_name(name: str) -> str:
    """The name without what FSDP, activation checkpointing and torch.compile put into it."""
    for wrapper in WRAPPERS:
        name = name.removeprefix(wrapper).replace(f".{wrapper}", ".")
    return name


def compute_dtype(model: nn.Module, *, bf16: bool, fp16: bool) -> str:
    """The precision the trainer computes in, as a safetensors name: its autocast type, else its largest weight's."""
    if bf16 or fp16:
        return "BF16" if bf16 else "F16"
    largest = max(unwrap(model).parameters(), key=lambda p: getattr(p, "ds_numel", p.numel()))
    return NAMES.get(largest.dtype, str(largest.dtype))
