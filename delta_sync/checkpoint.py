"""A Hugging Face checkpoint on this machine's disk: its tensors' bits, mapped rather than read."""

from __future__ import annotations

import mmap
from collections.abc import Collection, Iterator
from copy import copy
from pathlib import Path

from delta_sync.anchor_files import INDEX, SINGLE, Bits, Head, Tensor, parse_shard
from delta_sync.container import parse_json
from delta_sync.errors import FormatError
from delta_sync.limits import DEFAULT_LIMITS


class Checkpoint:
    """A folder with safetensors files, or one such file; bits are views into the files and take no memory.

    FormatError where it is no checkpoint, or a file is damaged; OSError.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.heads: dict[str, Head] = {}
        self._bits: dict[str, Bits] = {}
        for file in _files(path):
            for name, kind, shape, bits in parse_shard(_mapped(file), str(file), DEFAULT_LIMITS):
                if name in self.heads:
                    raise FormatError(f"tensor {name!r} of {path}", expected="each name in one file", got="it again")
                self.heads[name], self._bits[name] = (name, kind, shape), bits
        if not self.heads:
            raise FormatError(f"checkpoint {path}", expected="at least one tensor", got="none")

    def __getitem__(self, name: str) -> Tensor:
        return *self.heads[name], self._bits[name]

    def __iter__(self) -> Iterator[Tensor]:
        """(name, dtype, shape, bits ``[n]``, read-only) of every tensor, by name."""
        return (self[name] for name in sorted(self.heads))

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(bits.size for bits in self._bits.values())

    def only(self, names: Collection[str]) -> Checkpoint:
        """The same files with these tensors alone."""
        part = copy(self)
        part.heads = {name: self.heads[name] for name in names}
        part._bits = {name: self._bits[name] for name in names}
        return part

    def others(self) -> dict[str, Path]:
        """Config, tokenizer and whatever else lies in the folder: name below it -> path; no weights."""
        if self.path.is_file():
            return {}
        found = {path.relative_to(self.path).as_posix(): path for path in self.path.rglob("*") if path.is_file()}
        return {name: path for name, path in found.items() if not _is_weights(name)}


def is_checkpoint(path: Path) -> bool:
    """Whether a local folder holds weights; that of a run has none at its top."""
    return path.is_dir() and any(path.glob("*.safetensors"))


def check_same_heads(one: Checkpoint, other: Checkpoint) -> None:
    """FormatError naming the first tensor that the two don't have alike."""
    for name in sorted(one.heads.keys() | other.heads.keys()):
        here, there = _shown(one.heads.get(name)), _shown(other.heads.get(name))
        if here != there:
            raise FormatError(f"tensor {name!r} of {other.path}", expected=f"{here} as in {one.path}", got=there)


def _shown(head: Head | None) -> str:
    return "no such tensor" if head is None else f"{head[1].name} {list(head[2])}"


def _is_weights(name: str) -> bool:
    return name == INDEX or name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf"))


def _files(path: Path) -> list[Path]:
    """A checkpoint's safetensors files: those of the index, else model.safetensors, else the only one."""
    if path.is_file():
        return [path]
    if (path / INDEX).is_file():
        return [path / name for name in _indexed(path / INDEX)]
    if (path / SINGLE).is_file():
        return [path / SINGLE]
    found = sorted(path.glob("*.safetensors"))
    if len(found) != 1:
        expected = f"{SINGLE}, {INDEX}, or one safetensors file"
        got = f"{len(found)} such files" if path.is_dir() else "no such folder"
        remedy = "`delta-sync materialize URI@VERSION DIR` makes a checkpoint of a run's version"
        raise FormatError(f"checkpoint {path}", expected=expected, got=got, remedy=remedy)
    return found


def _indexed(index: Path) -> list[str]:
    if index.stat().st_size > DEFAULT_LIMITS.manifest_bytes:
        raise FormatError(str(index), expected=f"at most {DEFAULT_LIMITS.manifest_bytes} bytes", got="more")
    document = parse_json(index.read_bytes(), str(index))
    weight_map = document.get("weight_map") if isinstance(document, dict) else None
    names = set(weight_map.values()) if isinstance(weight_map, dict) and _are_texts(weight_map) else set()
    if not names or any(Path(name).name != name for name in names):
        raise FormatError(str(index), expected="a weight_map of file names", got="none")
    return sorted(names)


def _are_texts(weight_map: dict[str, object]) -> bool:
    return all(isinstance(name, str) for name in weight_map.values())


def _mapped(file: Path) -> bytes | mmap.mmap:
    with file.open("rb") as opened:
        if file.stat().st_size == 0:  # cannot be mapped
            return b""
        return mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
