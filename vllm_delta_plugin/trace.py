"""Learn where each checkpoint element goes by letting the model load tensors that have a shape but no data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vllm_delta_plugin.rearranged import Dim, Rearranged

Ints = tuple[int, ...]
NEEDS_VALUES = "the loader needs its values"
_COPIES = {torch.ops.aten.copy_.default, torch.ops.aten._foreach_copy_.default}
_SAME_VALUES = {torch.ops.aten.clone.default, torch.ops.aten._to_copy.default}
_CONSTANTS = {torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default}


@dataclass(frozen=True)
class Copy:
    """One recorded write: ``shape`` elements of checkpoint tensor ``source`` into live storage at address ``storage``.

    Offsets and strides are in elements; ``dtype`` is the destination's.
    """

    source: str
    storage: int
    dtype: torch.dtype
    shape: Ints
    src_offset: int
    src_strides: Ints
    dst_offset: int
    dst_strides: Ints


@dataclass
class Trace:
    """What loading did: ``copies``, why some tensors cannot be followed, and which the loader never read from.

    ``blank``: of those, what it had but replaced by a constant, since another rank holds the values.
    """

    copies: list[Copy] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)
    blank: set[str] = field(default_factory=set)


def trace_load(model: torch.nn.Module, tensors: Mapping[str, Ints], dtype: torch.dtype) -> Trace:
    """Feed ``model.load_weights`` meta tensors named and shaped as ``tensors``; record every copy, write nothing."""
    recorder = _Recorder(model)
    with torch.no_grad(), recorder:
        try:
            model.load_weights(recorder.feed(tensors, dtype))  # type: ignore[operator]
        except Exception as error:  # noqa: BLE001 - any failure of foreign loader code is a reason to refuse, by name
            recorder.trace.problems[recorder.current] = f"{NEEDS_VALUES} ({type(error).__name__}: {error})"
    touched = {copy.source for copy in recorder.trace.copies} | set(recorder.trace.problems)
    recorder.trace.ignored = [name for name in tensors if name not in touched]
    return recorder.trace


def _live_storages(model: torch.nn.Module) -> set[int]:
    tensors = [*model.parameters(), *model.buffers()]
    return {_key(tensor) for tensor in tensors}


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Intercepts writes to live storages; follows views of the fed tensors, and names what was computed from them."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.trace = Trace()
        self.current = "(before the first tensor)"
        self._live = _live_storages(model)
        self._sources: dict[int, Rearranged] = {}
        self._derived: dict[int, tuple[set[str], str]] = {}
        self._keep: list[torch.Tensor] = []  # storages are told apart by address, so none may be freed and reused

    def feed(self, tensors: Mapping[str, Ints], dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield ``(name, meta tensor)`` and remember which storage belongs to which name."""
        for name, shape in tensors.items():
            tensor = torch.empty(shape, dtype=dtype, device="meta")
            self._keep.append(tensor)
            self._sources[_key(tensor)] = Rearranged.untouched(name, shape)
            self.current = name
            yield name, tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _COPIES:
            return self._copy(func, args)
        written = list(_written(func, args, kwargs))
        if any(self._is_live(tensor) for tensor in written):
            return self._other_write(func, args, written)
        for tensor in written:
            if func in _CONSTANTS and self._is_whole(tensor):
                self.trace.blank.add(self._sources.pop(_key(tensor)).source)
            else:
                self._refuse_changed(tensor, str(func))
        out = func(*args, **kwargs)
        if func in _SAME_VALUES and out.dtype == args[0].dtype:
            self._rearranged(args[0], out)
        self._follow(func, [*tree_leaves(args), *tree_leaves(kwargs)], tree_leaves(out))
        return out

    def _is_live(self, tensor: torch.Tensor) -> bool:
        return _key(tensor) in self._live

    def _is_whole(self, tensor: torch.Tensor) -> bool:
        """Whether it is all of a checkpoint tensor, or of a copy of one."""
        return _key(tensor) in self._sources and tensor.nbytes == tensor.untyped_storage().nbytes()

    def _refuse_changed(self, tensor: torch.Tensor, op: str) -> None:
        if _key(tensor) in self._sources:
            self._refuse({self._sources[_key(tensor)].source}, f"it is changed by {op} before it is written")

    def _rearranged(self, tensor: torch.Tensor, copy: torch.Tensor) -> None:
        """A copy, say from contiguous() or reshape(), still holds the checkpoint's own elements."""
        source = self._sources.get(_key(tensor))
        if source and tensor.numel() and (found := source.copied(int(tensor.storage_offset()), _dims(tensor, copy))):
            self._keep.append(copy)
            self._sources[_key(copy)] = found

    def _origin(self, tensor: torch.Tensor) -> tuple[set[str], str] | None:
        """The checkpoint tensors this one was computed from, with the operation; None if it is unrelated."""
        key = _key(tensor)
        if key in self._sources:
            return {self._sources[key].source}, ""
        return self._derived.get(key)

    def _follow(self, func: Any, inputs: list[Any], outputs: list[Any]) -> None:
        origins = [o for t in inputs if isinstance(t, torch.Tensor) and (o := self._origin(t))]
        if not origins:
            return
        names = set().union(*(names for names, _ in origins))
        for tensor in outputs:
            if isinstance(tensor, torch.Tensor) and self._origin(tensor) is None and not self._is_live(tensor):
                self._keep.append(tensor)
                self._derived[_key(tensor)] = (names, str(func))

    def _copy(self, func: Any, args: Any) -> Any:
        pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]
        pairs = zip(args[0], args[1], strict=True) if isinstance(args[0], list | tuple) else [(args[0], args[1])]
        for dst, src in pairs:
            self._copy_one(dst, src, str(func))
        return args[0] if func._schema.returns else None

    def _copy_one(self, dst: torch.Tensor, src: torch.Tensor, op: str) -> None:
        origin = self._origin(src)
        if not self._is_live(dst):
            self._refuse_changed(dst, op)
            if origin:
                self._keep.append(dst)
                self._derived[_key(dst)] = (origin[0], op)
            elif dst.device.type != "meta" and src.device.type != "meta":
                torch.ops.aten.copy_.default(dst, src)
            return
        if origin is None:
            return  # a constant written over itself: the real load has already put it there
        names, how = origin
        if how:
            self._refuse(names, f"it is transformed by {how} before it is written")
            return
        if dst.numel():
            self._record(next(iter(names)), dst, src.expand(dst.shape))

    def _record(self, name: str, dst: torch.Tensor, src: torch.Tensor) -> None:
        found = self._sources[_key(src)].follow(int(src.storage_offset()), _dims(src, dst))
        if found is None:
            self._refuse({name}, "it is rearranged in a way that strides do not describe")
            return
        offset, dims = found
        shape, src_strides, dst_strides = zip(*dims, strict=True) if dims else ((), (), ())
        place = int(dst.storage_offset())
        self.trace.copies.append(Copy(name, _key(dst), dst.dtype, shape, offset, src_strides, place, dst_strides))

    def _other_write(self, func: Any, args: Any, written: list[torch.Tensor]) -> Any:
        if func not in _CONSTANTS:
            sources = [o for t in tree_leaves(args) if isinstance(t, torch.Tensor) and (o := self._origin(t))]
            names = set().union(*(names for names, _ in sources)) or {self.current}
            self._refuse(names, f"it is written by {func}, not by a plain copy")
        return written[0] if func._schema.returns else None

    def _refuse(self, names: set[str], reason: str) -> None:
        for name in names:
            self.trace.problems.setdefault(name, reason)


def _key(tensor: torch.Tensor) -> int:
    """Tells storages apart, while they are kept."""
    return int(tensor.untyped_storage()._cdata)


def _dims(tensor: torch.Tensor, other: torch.Tensor) -> list[Dim]:
    """Sizes and strides of two tensors of one shape."""
    return list(zip(tensor.shape, tensor.stride(), other.stride(), strict=True))


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """The tensors an operator writes to, by its schema."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[position] if position < len(args) else kwargs.get(argument.name)
        yield from (t for t in tree_leaves(value) if isinstance(t, torch.Tensor))
