"""Anchors as files: an ordinary sharded Hugging Face checkpoint, written in one pass and read shard by shard."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from delta_sync.container import is_sizes, parse_json
from delta_sync.dtypes import DType, dtype
from delta_sync.errors import FormatError, IntegrityError
from delta_sync.limits import Limits
from delta_sync.manifest import AnchorRecord, ObjectRef
from delta_sync.strict_json import clip

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

SHARD_BYTES = 1024**3
HEADER_BYTES = 128 * 1024  # reserved in front of each shard so that one pass is enough; what is left stays blank
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Bits = npt.NDArray[np.unsignedinteger]
Tensor = tuple[str, DType, tuple[int, ...], Bits]


def write_anchor_files(
    folder: Path, tensors: Iterable[Tensor], *, shard_bytes: int = SHARD_BYTES, header_bytes: int = HEADER_BYTES
) -> dict[str, Path]:
    """Write (name, dtype, shape, bits ``[n]``) as shards of at most about ``shard_bytes`` bytes; name -> path.

    One shard is ``model.safetensors``, several are ``model-0000k-of-0000n.safetensors`` with their index. Holds no
    more than one tensor in memory. FormatError if bits do not fit their shape or a name comes twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shards: list[_Shard] = []
    seen: set[str] = set()
    try:
        for tensor in tensors:
            _check(tensor, seen)
            if not shards or not shards[-1].fits(tensor, shard_bytes):
                if shards:
                    shards[-1].close()
                shards.append(_Shard(folder / f"shard-{len(shards) + 1}.part", header_bytes))
            shards[-1].add(tensor)
    finally:
        if shards:
            shards[-1].close()
    if not shards:
        raise FormatError("anchor", expected="at least one tensor", got="none")
    return _named(folder, shards)


class _Shard:
    """One safetensors file being written: blank header space first, then data, then the header."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self.path, self.header_bytes = path, header_bytes
        self.entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self.size = 0
        self._header = 64
        self._file = path.open("wb")
        self._file.write(b" " * (8 + header_bytes))

    def fits(self, tensor: Tensor, shard_bytes: int) -> bool:
        """Whether the tensor may follow: size, header space, and its alignment, which loaders need."""
        name, kind, shape, bits = tensor
        room = self.header_bytes - self._header >= _entry_bytes(name, shape)
        return room and self.size % kind.itemsize == 0 and (self.size == 0 or self.size + bits.nbytes <= shard_bytes)

    def add(self, tensor: Tensor) -> None:
        name, kind, shape, bits = tensor
        self._file.write(np.ascontiguousarray(bits).data)
        end = self.size + bits.nbytes
        self.entries[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": [self.size, end]}
        self.size = end
        self._header += _entry_bytes(name, shape)

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file:
            text = json.dumps(self.entries, separators=(",", ":")).encode()
            self._file.seek(0)
            self._file.write(struct.pack("<Q", self.header_bytes) + text)


def _entry_bytes(name: str, shape: tuple[int, ...]) -> int:
    """An upper bound on what a tensor takes in the header."""
    return len(json.dumps(name)) + 21 * len(shape) + 120


def _check(tensor: Tensor, seen: set[str]) -> None:
    name, kind, shape, bits = tensor
    if name in seen or name == "__metadata__":
        raise FormatError(f"tensor {name!r} of an anchor", expected="each name once", got="it again")
    seen.add(name)
    if bits.dtype != kind.carrier or bits.shape != (math.prod(shape),):
        expected = f"{kind.carrier} [{math.prod(shape)}]"
        raise FormatError(f"bits of {name}", expected=expected, got=f"{bits.dtype} {list(bits.shape)}")


def _named(folder: Path, shards: list[_Shard]) -> dict[str, Path]:
    """Give the shards their final names, now that their number is known, and write the index if there are several."""
    count = len(shards)
    weight_map: dict[str, str] = {}
    files: dict[str, Path] = {}
    for number, shard in enumerate(shards, 1):
        name = SINGLE if count == 1 else f"model-{number:05d}-of-{count:05d}.safetensors"
        files[name] = shard.path.replace(folder / name)
        weight_map |= dict.fromkeys(shard.entries.keys() - {"__metadata__"}, name)
    if count > 1:
        index = {"metadata": {"total_size": sum(shard.size for shard in shards)}, "weight_map": weight_map}
        files[INDEX] = folder / INDEX
        files[INDEX].write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return files


def iter_anchor_tensors(
    ledger: Ledger, record: AnchorRecord, wanted: Collection[str] | None = None
) -> Iterator[Tensor]:
    """An anchor's tensors as (name, dtype, shape, bits ``[n]``, read-only); only those named in ``wanted``, if given.

    Reads one shard at a time, whole, and checks its sha256 before handing on any of it. So memory holds one shard
    (about 1 GiB, or one tensor if that is larger), and a second one only while the caller still keeps a tensor of the
    one before: ``bits`` are views that keep their shard alive. Shards with nothing wanted are not read where an index
    says so. Never looks at config, tokenizer or code. IntegrityError if a shard, or the set of tensors, is not what
    the record promises; FormatError.
    """
    left = set(record.tensors) if wanted is None else set(wanted)
    if unknown := left - record.tensors.keys():
        raise IntegrityError("anchor", expected=f"tensors {sorted(unknown)[:3]}", got="a record without them")
    for ref in _shards(ledger, record, left):
        yield from _wanted_of(ledger, record, ref, left)
    if left:
        raise IntegrityError(f"anchor {record.version}", expected=f"tensors {sorted(left)[:3]}", got="shards without")


def _wanted_of(ledger: Ledger, record: AnchorRecord, ref: ObjectRef, left: set[str]) -> Iterator[Tensor]:
    """One shard's tensors that are still wanted; a function of its own, so that its shard is freed when it ends."""
    for name, kind, shape, bits in parse_shard(ledger.read_object(ref), ref.key, ledger.limits):
        state = record.tensors.get(name)
        if state is None or (state.dtype, state.shape) != (kind.name, shape):
            expected = "no such tensor" if state is None else f"{state.dtype} {list(state.shape)}"
            raise IntegrityError(
                f"tensor {clip(name)!r} in {ref.key}", expected=expected, got=f"{kind.name} {list(shape)}"
            )
        if name in left:
            left.remove(name)
            yield name, kind, shape, bits


def _shards(ledger: Ledger, record: AnchorRecord, wanted: set[str]) -> list[ObjectRef]:
    """The shards that hold wanted tensors, as the index says; all of them without an index."""
    shards = [ref for ref in record.objects if ref.key.endswith(".safetensors")]
    index = next((ref for ref in record.objects if ref.key.rpartition("/")[2] == INDEX), None)
    if index is None:
        return shards
    document = parse_json(ledger.read_object(index), index.key)
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise FormatError(index.key, expected="a weight_map of file names", got="none")
    files = {weight_map.get(name) for name in wanted}
    return [ref for ref in shards if ref.key.rpartition("/")[2] in files]


def parse_shard(data: bytes, what: str, limits: Limits) -> Iterator[Tensor]:
    """The tensors of one safetensors file's bytes, as views into them; FormatError for anything out of order."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(limits.header_bytes, len(data) - 8):
        raise FormatError(f"header of {what}", expected="a length within the file", got=length)
    header = parse_json(data[8 : 8 + length], what)
    if not isinstance(header, dict):
        raise FormatError(f"header of {what}", expected="a JSON object", got=type(header).__name__)
    header.pop("__metadata__", None)
    entries = [_entry(name, entry, what) for name, entry in header.items()]
    at = 8 + length
    for name, kind, shape, start, end in sorted(entries, key=lambda entry: entry[3:]):
        if 8 + length + start != at or end - start != math.prod(shape) * kind.itemsize or 8 + length + end > len(data):
            raise FormatError(
                f"tensor {clip(name)!r} of {what}", expected="its shape's bytes, without holes", got=[start, end]
            )
        yield name, kind, shape, np.frombuffer(data, kind.carrier, math.prod(shape), at)
        at = 8 + length + end
    if at != len(data):
        raise FormatError(what, expected=f"{at} bytes", got=len(data))


def _entry(name: str, entry: Any, what: str) -> tuple[str, DType, tuple[int, ...], int, int]:
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise FormatError(
            f"tensor {clip(name)!r} of {what}", expected="dtype, shape and data_offsets", got=repr(entry)[:100]
        )
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not is_sizes(shape) or not is_sizes(offsets) or len(offsets) != 2:
        raise FormatError(
            f"tensor {clip(name)!r} of {what}", expected="sizes that are not negative", got=repr(entry)[:100]
        )
    return name, dtype(entry["dtype"]), tuple(shape), offsets[0], offsets[1]
