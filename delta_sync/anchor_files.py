"""Anchors as files: an ordinary sharded Hugging Face checkpoint, written in one pass and read shard by shard."""

from __future__ import annotations

import json
import math
import mmap
import struct
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from delta_sync.container import is_sizes, parse_json
from delta_sync.dtypes import DType, dtype
from delta_sync.errors import FormatError, IntegrityError
from delta_sync.limits import Limits
from delta_sync.manifest import AnchorRecord, ObjectRef
from delta_sync.store.keys import anchor_key
from delta_sync.strict_json import clip

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger

SHARD_BYTES = 1024**3  # below every store's and loader's 5 GB; a tensor that is larger has a file of its own
HEADER_BYTES = 128 * 1024  # reserved in front of each shard so that one pass is enough; what is left stays blank
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
Bits = npt.NDArray[np.unsignedinteger]
Head = tuple[str, DType, tuple[int, ...]]
Tensor = tuple[str, DType, tuple[int, ...], Bits]
Layout = dict[str, list[Head]]  # file name -> its tensors, in order


def write_anchor_files(
    folder: Path, tensors: Iterable[Tensor], *, shard_bytes: int = SHARD_BYTES, header_bytes: int = HEADER_BYTES
) -> dict[str, Path]:
    """Write (name, dtype, shape, bits ``[n]``) as shards of at most about ``shard_bytes`` bytes; name -> path.

    One shard is ``model.safetensors``, several are ``model-0000k-of-0000n.safetensors`` with their index. Holds no
    more than one tensor in memory. FormatError if bits do not fit their shape or a name comes twice.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rooms = _Rooms(shard_bytes, header_bytes)
    paths: list[Path] = []
    shard: _Shard | None = None
    try:
        for tensor in tensors:
            if rooms.place(tensor[:3]) or shard is None:
                if shard:
                    shard.close()
                paths.append(folder / f"shard-{len(paths) + 1}.part")
                shard = _Shard(paths[-1], header_bytes)
            shard.add(tensor)
    finally:
        if shard:
            shard.close()
    layout = rooms.layout()
    files = {name: path.replace(folder / name) for path, name in zip(paths, layout, strict=True)}
    if len(layout) > 1:
        files[INDEX] = folder / INDEX
        files[INDEX].write_bytes(index_bytes(layout))
    return files


def shard_layout(heads: Iterable[Head], *, shard_bytes: int = SHARD_BYTES) -> Layout:
    """Which file of a checkpoint holds which tensors, in order; the same for the same names, dtypes and shapes.

    FormatError if a name comes twice or there is no tensor.
    """
    rooms = _Rooms(shard_bytes, HEADER_BYTES)
    for head in heads:
        rooms.place(head)
    return rooms.layout()


def write_shard(path: Path, tensors: Iterable[Tensor]) -> None:
    """Write one file of a layout; FormatError if bits do not fit their shape."""
    shard = _Shard(path, HEADER_BYTES)
    try:
        for tensor in tensors:
            shard.add(tensor)
    finally:
        shard.close()


def index_bytes(layout: Layout) -> bytes:
    """The index that a checkpoint of several shards needs, ``model.safetensors.index.json``."""
    total = sum(_nbytes(head) for heads in layout.values() for head in heads)
    weight_map = {name: file for file, heads in layout.items() for name, *_ in heads}
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


class _Rooms:
    """Deals tensors out to shards in the order given: a shard is full by size, header space, or alignment."""

    def __init__(self, shard_bytes: int, header_bytes: int) -> None:
        self._shard_bytes, self._header_bytes = shard_bytes, header_bytes
        self._shards: list[list[Head]] = []
        self._seen: set[str] = set()
        self._size = self._header = 0

    def place(self, head: Head) -> bool:
        """Give the tensor its place; whether that begins another shard."""
        name, kind, shape = head
        if name in self._seen or name == "__metadata__":
            raise FormatError(f"tensor {name!r} of an anchor", expected="each name once", got="it again")
        self._seen.add(name)
        size, entry = _nbytes(head), _entry_bytes(name, shape)
        room = self._header_bytes - self._header >= entry and self._size % kind.itemsize == 0
        fits = bool(self._shards) and room and (self._size == 0 or self._size + size <= self._shard_bytes)
        if not fits:
            self._shards.append([])
            self._size, self._header = 0, 64
        self._shards[-1].append(head)
        self._size += size
        self._header += entry
        return not fits

    def layout(self) -> Layout:
        """File names, known only now that the number of shards is, and their tensors."""
        count = len(self._shards)
        if not count:
            raise FormatError("anchor", expected="at least one tensor", got="none")
        if count == 1:
            return {SINGLE: self._shards[0]}
        return {f"model-{k:05d}-of-{count:05d}.safetensors": heads for k, heads in enumerate(self._shards, 1)}


class _Shard:
    """One safetensors file being written: blank header space first, then data, then the header."""

    def __init__(self, path: Path, header_bytes: int) -> None:
        self._header_bytes = header_bytes
        self._entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._size = 0
        self._file = path.open("wb")
        self._file.write(b" " * (8 + header_bytes))

    def add(self, tensor: Tensor) -> None:
        name, kind, shape, bits = tensor
        if bits.dtype != kind.carrier or bits.shape != (math.prod(shape),):
            expected = f"{kind.carrier} [{math.prod(shape)}]"
            raise FormatError(f"bits of {name}", expected=expected, got=f"{bits.dtype} {list(bits.shape)}")
        self._file.write(np.ascontiguousarray(bits).data)
        end = self._size + bits.nbytes
        self._entries[name] = {"dtype": kind.name, "shape": list(shape), "data_offsets": [self._size, end]}
        self._size = end

    def close(self) -> None:
        if self._file.closed:
            return
        with self._file:
            text = json.dumps(self._entries, separators=(",", ":")).encode()
            self._file.seek(0)
            self._file.write(struct.pack("<Q", self._header_bytes) + text)


def _nbytes(head: Head) -> int:
    _, kind, shape = head
    return math.prod(shape) * kind.itemsize


def _entry_bytes(name: str, shape: tuple[int, ...]) -> int:
    """An upper bound on what a tensor takes in the header."""
    return len(json.dumps(name)) + 21 * len(shape) + 120


def iter_anchor_tensors(
    ledger: Ledger,
    record: AnchorRecord,
    wanted: Collection[str] | None = None,
    reading: Callable[[str], None] = lambda key: None,
) -> Iterator[Tensor]:
    """An anchor's tensors as (name, dtype, shape, bits ``[n]``, read-only); only those named in ``wanted``, if given.

    Reads one shard at a time, whole, and checks its sha256 before handing on any of it. So memory holds one shard
    (about 1 GiB, or one tensor if that is larger), and a second one only while the caller still keeps a tensor of the
    one before: ``bits`` are views that keep their shard alive. Shards with nothing wanted are not read where an index
    says so. ``reading`` is told the key of what is looked at: a shard, or the record for what is wrong with the whole.
    Never looks at config, tokenizer or code. IntegrityError if a shard, or the set of tensors, is not what the record
    promises; FormatError.
    """
    whole = anchor_key(record.version, record.epoch)
    reading(whole)
    left = set(record.tensors) if wanted is None else set(wanted)
    if unknown := left - record.tensors.keys():
        raise IntegrityError("anchor", expected=f"tensors {sorted(unknown)[:3]}", got="a record without them")
    shards = AnchorShards(ledger, record)
    shards.read_index()
    for ref in shards.holding(left):
        reading(ref.key)
        yield from _wanted_of(shards, ref, left)
    reading(whole)
    if left:
        raise IntegrityError(f"anchor {record.version}", expected=f"tensors {sorted(left)[:3]}", got="shards without")


def _wanted_of(shards: AnchorShards, ref: ObjectRef, left: set[str]) -> Iterator[Tensor]:
    """One shard's tensors that are still wanted; a function of its own, so that its shard is freed when it ends."""
    for name, kind, shape, bits in shards.tensors(ref):
        if name in left:
            left.remove(name)
            yield name, kind, shape, bits


class AnchorShards:
    """What every reader demands of an anchor's files: each tensor in one file alone, the one that the index names.

    ``index`` is that file's place, None where there is none. Nothing is read before it is asked for.
    """

    def __init__(self, ledger: Ledger, record: AnchorRecord) -> None:
        self._ledger, self._record = ledger, record
        self.refs = [ref for ref in record.objects if ref.key.endswith(".safetensors")]
        self.index = next((ref for ref in record.objects if _file(ref) == INDEX), None)
        self._places: dict[str, str] | None = None  # tensor -> file
        self._seen: set[str] = set()

    def read_index(self) -> None:
        """Heed the index from now on, if there is one; what reading raises, FormatError for anything but an index."""
        if self.index is None:
            return
        document = parse_json(self._ledger.read_object(self.index), self.index.key)
        places = document.get("weight_map") if isinstance(document, dict) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise FormatError(self.index.key, expected="a weight_map of file names", got="none")
        self._places = places

    def holding(self, wanted: Collection[str]) -> list[ObjectRef]:
        """The shards that hold wanted tensors, as the index says; all of them without an index."""
        if self._places is None:
            return self.refs
        files = {self._places.get(name) for name in wanted}
        return [ref for ref in self.refs if _file(ref) in files]

    def tensors(self, ref: ObjectRef) -> Iterator[Tensor]:
        """One shard's tensors, each checked; what reading raises, IntegrityError for one that should not be there."""
        for name, kind, shape, bits in parse_shard(self._ledger.read_object(ref), ref.key, self._ledger.limits):
            what, state = f"tensor {clip(name)!r} in {ref.key}", self._record.tensors.get(name)
            if state is None or (state.dtype, state.shape) != (kind.name, shape):
                expected = "no such tensor" if state is None else f"{state.dtype} {list(state.shape)}"
                raise IntegrityError(what, expected=expected, got=f"{kind.name} {list(shape)}")
            if self._places is not None and (place := self._places.get(name)) != _file(ref):
                expected = "not in the index" if place is None else f"in {clip(place)}, as the index says"
                raise IntegrityError(what, expected=expected, got=f"in {_file(ref)}", remedy="attach a new anchor")
            if name in self._seen:
                raise IntegrityError(what, expected="in one file", got="in two", remedy="attach a new anchor")
            self._seen.add(name)
            yield name, kind, shape, bits


def _file(ref: ObjectRef) -> str:
    return ref.key.rpartition("/")[2]


def parse_shard(data: bytes | mmap.mmap, what: str, limits: Limits) -> Iterator[Tensor]:
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
