"""The additive digest: per tensor, a keyed sum over its elements, modulo 2**64.

Because it is a sum, shards' digests add up to the tensor's, and a change moves it by a sum over changed elements.
It catches accidents; malice is what hashes and signatures are for. docs/FORMAT.md defines it with test values.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from delta_sync.bitmap import Bits
from delta_sync.breath import breathe
from delta_sync.errors import FormatError, MappingError
from delta_sync.jit import compiled
from delta_sync.manifest import TensorState

MAX_RANK = 8
_DOMAIN = b"delta-sync/digest/1\0"
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX2 = np.uint64(0x94D049BB133111EB)
_S27, _S30, _S31, _ONE = np.uint64(27), np.uint64(30), np.uint64(31), np.uint64(1)


def tensor_key(name: str) -> int:
    """The 64-bit key of a tensor's digest, derived from its name."""
    return int.from_bytes(hashlib.sha256(_DOMAIN + name.encode()).digest()[:8], "little")


@compiled
def _factor(state: Any) -> Any:
    """splitmix64's finaliser, made odd; ``state`` is key + (position + 1) * golden, a uint64."""
    z = (state ^ (state >> _S30)) * _MIX1
    z = (z ^ (z >> _S27)) * _MIX2
    return (z ^ (z >> _S31)) | _ONE


@compiled
def _sum_run(bits: Any, state: Any) -> Any:
    """Sum of factor * bits over consecutive positions; ``state`` belongs to the first."""
    total = np.uint64(0)
    for i in range(bits.size):
        total += _factor(state + np.uint64(i) * _GOLDEN) * np.uint64(bits[i])
    return total


@compiled
def _mix(key: Any, positions: Any, out: Any) -> None:
    for i in range(positions.size):
        out[i] = _factor(key + (np.uint64(positions[i]) + _ONE) * _GOLDEN)


@compiled
def _sum_change(positions: Any, old: Any, new: Any, key: Any) -> Any:
    total = np.uint64(0)
    for i in range(positions.size):
        step = np.uint64(new[i]) - np.uint64(old[i])
        total += _factor(key + (np.uint64(positions[i]) + _ONE) * _GOLDEN) * step
    return total


@compiled
def _sum_region(bits: Any, at: Any, at_strides: Any, position: Any, strides: Any, shape: Any, key: Any) -> Any:
    """Walk an affine region row by row; the last axis is the inner loop."""
    last = shape.size - 1
    index = np.zeros(shape.size, np.int64)
    total = np.uint64(0)
    while True:
        state = key + (np.uint64(position) + _ONE) * _GOLDEN
        pace = np.uint64(strides[last]) * _GOLDEN
        if at_strides[last] == 1:
            run = bits[at : at + shape[last]]
            for i in range(run.size):
                total += _factor(state + np.uint64(i) * pace) * np.uint64(run[i])
        else:
            for i in range(shape[last]):
                total += _factor(state + np.uint64(i) * pace) * np.uint64(bits[at + i * at_strides[last]])
        axis = last - 1
        while axis >= 0:
            index[axis] += 1
            at += at_strides[axis]
            position += strides[axis]
            if index[axis] < shape[axis]:
                break
            at -= at_strides[axis] * shape[axis]
            position -= strides[axis] * shape[axis]
            index[axis] = 0
            axis -= 1
        if axis < 0:
            return total


def mix(key: int, positions: npt.NDArray[np.integer]) -> npt.NDArray[np.uint64]:
    """The factors, uint64 ``[n]``, by which the bits at ``positions`` enter the digest of the tensor with ``key``."""
    out = np.empty(positions.size, np.uint64)
    _mix(np.uint64(key), positions, out)
    return out


def digest(bits: Bits, key: int, start: int = 0) -> int:
    """Digest of carrier bits, any shape, that lie row-major at positions ``start``, ``start`` + 1, ..."""
    state = (key + (start + 1) * int(_GOLDEN)) % 2**64
    return int(_sum_run(np.ascontiguousarray(bits).reshape(-1), np.uint64(state)))


def digest_change(positions: npt.NDArray[np.int64], old_bits: Bits, new_bits: Bits, key: int) -> int:
    """By how much the digest moves, modulo 2**64, when ``old_bits`` at ``positions`` become ``new_bits``."""
    if not positions.size == old_bits.size == new_bits.size:
        got = f"{old_bits.size} old and {new_bits.size} new for {positions.size} positions"
        raise FormatError("digest change", expected="as many old and new bits as positions", got=got)
    return int(_sum_change(positions, old_bits, new_bits, np.uint64(key)))


def digest_region(
    storage_bits: Bits,
    dst_offset: int,
    dst_strides: Sequence[int],
    src_offset: int,
    src_strides: Sequence[int],
    shape: Sequence[int],
    key: int,
) -> int:
    """Digest of the part of a tensor that a flat storage holds as an affine region.

    Element ``index`` of ``shape`` lies at ``dst_offset + index . dst_strides`` of the storage and is position
    ``src_offset + index . src_strides`` of the tensor; all in elements. MappingError if it leaves the storage.
    """
    if not len(dst_strides) == len(src_strides) == len(shape) or len(shape) > MAX_RANK:
        got = f"shape {tuple(shape)}, strides {tuple(dst_strides)} and {tuple(src_strides)}"
        raise MappingError("digest region", expected=f"equal ranks of at most {MAX_RANK}", got=got)
    if 0 in shape:
        return 0
    low, high = _span(dst_offset, dst_strides, shape)
    if low < 0 or high >= storage_bits.size or storage_bits.ndim != 1 or _span(src_offset, src_strides, shape)[0] < 0:
        raise MappingError(
            "digest region", expected=f"elements within the storage's {storage_bits.size}", got=f"{low} to {high}"
        )
    axes = [np.array(axis, np.int64) for axis in _merge_axes(dst_strides, src_strides, shape)]
    return int(_sum_region(storage_bits, dst_offset, axes[0], src_offset, axes[1], axes[2], np.uint64(key)))


def _span(offset: int, strides: Sequence[int], shape: Sequence[int]) -> tuple[int, int]:
    """Lowest and highest index an affine region touches."""
    reach = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
    return offset + sum(min(r, 0) for r in reach), offset + sum(max(r, 0) for r in reach)


def _merge_axes(
    dst_strides: Sequence[int], src_strides: Sequence[int], shape: Sequence[int]
) -> tuple[list[int], list[int], list[int]]:
    """Join axes that walk on where the next one ends, on both sides, so that the inner loop is long."""
    dst, src, sizes = [1], [1], [1]
    for d, s, n in zip(dst_strides, src_strides, shape, strict=True):
        if n == 1:
            continue
        if sizes[-1] == 1 or (dst[-1] == d * n and src[-1] == s * n):
            dst[-1], src[-1], sizes[-1] = d, s, sizes[-1] * n
        else:
            dst, src, sizes = [*dst, d], [*src, s], [*sizes, n]
    return dst, src, sizes


def state_digest(tensors: Mapping[str, TensorState]) -> str:
    """sha256 hex over all tensors' names, dtypes, shapes and digests: one model state's identity."""
    return _hash_lines(tensors, lambda state: b"\0%016x\n" % state.digest)


def model_fingerprint(tensors: Mapping[str, TensorState]) -> str:
    """sha256 hex over all tensors' names, dtypes and shapes: what two sides must agree on before any bits."""
    return _hash_lines(tensors, lambda state: b"\n")


def _hash_lines(tensors: Mapping[str, TensorState], end: Callable[[TensorState], bytes]) -> str:
    total = hashlib.sha256()
    for name in sorted(tensors, key=str.encode):
        breathe()
        state = tensors[name]
        shape = ",".join(map(str, state.shape))
        total.update(f"{name}\0{state.dtype}\0{shape}".encode() + end(state))
    return total.hexdigest()
