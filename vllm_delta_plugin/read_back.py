"""Putting one tensor's live bytes together from the regions that the ranks hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from delta_sync.adapter import split_name
from delta_sync.cover import check_cover
from delta_sync.dtypes import dtype
from delta_sync.errors import MappingError
from vllm_delta_plugin.proof import Region
from vllm_delta_plugin.ranks import Ranks, Reply


def assemble(name: str, described: Mapping[str, Any], replies: Sequence[Reply]) -> bytes:
    """Row-major little-endian bytes of the whole tensor; MappingError if ranks' copies differ or leave gaps.

    Each reply has ``regions``: region key -> that region's elements as row-major bytes.
    """
    carrier = dtype(described["dtype"]).carrier
    whole = np.zeros(int(np.prod(described["shape"], dtype=np.int64)), carrier)
    seen: dict[str, bytes] = {}
    for rank, reply in enumerate(replies):
        for key, data in reply["regions"].items():
            if seen.setdefault(key, data) != data:
                raise MappingError(f"copies of region {key!r}", expected="equal bytes", got=f"others on rank {rank}")
    regions = {key: region for key in seen if (region := Region.parse(key)).tensor == name}
    _check_whole(name, described["shape"], list(regions.values()))
    for key, region in regions.items():
        _view(whole, region)[...] = np.frombuffer(seen[key], carrier).reshape(region.shape)
    return whole.tobytes()


def _check_whole(name: str, shape: Sequence[int], regions: Sequence[Region]) -> None:
    try:
        check_cover(name, shape, regions)
    except MappingError:
        raise MappingError(
            f"tensor {name!r}",
            expected="all of it on this engine's ranks",
            got="a part: engines that share experts hold the rest",
            remedy="read it from another engine, or compare its digest",
        ) from None


def read_adapter(name: str, shape: Sequence[int], ranks: Ranks) -> bytes:
    """An adapter's tensor as it is computed with; MappingError where ranks hold parts of it."""
    module, part = split_name(name)
    replies = ranks.tell("read_adapter", module, shape[0] if part == "A" else shape[1])
    if len(replies) != 1:
        raise MappingError(f"tensor {name!r}", expected="one rank", got=f"{len(replies)}, which share it")
    return bytes(replies[0][part])


def _view(flat: np.ndarray[Any, Any], region: Region) -> np.ndarray[Any, Any]:
    last = region.offset + sum((n - 1) * s for n, s in zip(region.shape, region.strides, strict=True))
    if region.offset < 0 or min(region.strides, default=0) < 0 or last >= flat.size:
        raise MappingError(f"region of tensor {region.tensor!r}", expected="a part of it", got=repr(region))
    strides = tuple(s * flat.itemsize for s in region.strides)
    return np.lib.stride_tricks.as_strided(flat[region.offset :], region.shape, strides, writeable=True)
