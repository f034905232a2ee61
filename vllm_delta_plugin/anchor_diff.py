"""Taking complete weights while serving: compare an anchor with live bits and keep only what differs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from delta_sync.anchor_files import iter_anchor_tensors
from delta_sync.delta import apply
from delta_sync.errors import ChainError, IntegrityError
from vllm_delta_plugin.background import Job
from vllm_delta_plugin.chain import Folded
from vllm_delta_plugin.coverage import WeightMap
from vllm_delta_plugin.regions import gather_source, locate, split
from vllm_delta_plugin.requantised import write_made
from vllm_delta_plugin.staged import StageBuilder, check_tensor

if TYPE_CHECKING:
    from delta_sync.ledger import Ledger
    from delta_sync.plan import Plan

Array = npt.NDArray[Any]
_CHUNK = 1 << 24  # elements compared at once


def stage_anchor(job: Job[Any], builder: StageBuilder, ledger: Ledger, plan: Plan, folded: Folded) -> None:
    """Stage the difference between live bits and the plan's target; StageTooLargeError above the builder's limit."""
    for name, bits in target_tensors(job, builder.weights, ledger, plan, folded):
        for region in builder.weights.regions[name]:
            live = builder.weights.storages[region.storage]
            for piece in split(region, _CHUNK):
                job.check()
                old = live.read_box(piece.shape, piece.dst_offset, piece.dst_strides)
                new = gather_source(bits, piece)
                differs = np.flatnonzero(old != new)
                positions, dst = locate(piece, differs)
                builder.add_values(region, positions, dst, old[differs], new[differs])


def load_dense(job: Job[Any], weights: WeightMap, ledger: Ledger, plan: Plan, folded: Folded) -> dict[str, int]:
    """Write the plan's target over live bits in place and return the fresh digests of all regions.

    Nothing may run on the weights meanwhile, and there is no way back: verify the digests before serving.
    """
    requantised = weights.requantised
    if requantised is not None:
        requantised.shadow.settle()
    for name, bits in target_tensors(job, weights, ledger, plan, folded):
        for region in weights.regions[name]:
            live = weights.storages[region.storage]
            new = torch.from_numpy(np.array(gather_source(bits, region)).view(f"<i{live.dtype.itemsize}"))
            box = live.bits.as_strided(region.shape, region.dst_strides, region.dst_offset)
            box.copy_(new.reshape(region.shape))
    for module in requantised.modules if requantised is not None else ():
        job.check()
        write_made(weights.storages, module)
    return weights.digests()


def target_tensors(
    job: Job[Any], weights: WeightMap, ledger: Ledger, plan: Plan, folded: Folded
) -> Iterator[tuple[str, Array]]:
    """Every tensor this rank holds, flat carrier bits at the plan's target; IntegrityError if one is missing.

    Each is the anchor's, checked against its sha256 by the reader, with the deltas after the anchor applied. The job
    is told which of the anchor's objects is read.
    """
    if plan.anchor is None:
        raise ChainError("plan", expected="an anchor", got="none")
    missing = set(weights.tensors)
    for name, dtype, shape, bits in iter_anchor_tensors(ledger, plan.anchor, missing, job.reading):
        job.check()
        check_tensor(weights, name, dtype, tuple(shape), only_rank=True)
        missing.discard(name)
        flat = np.array(bits, copy=bool(folded.get(name)) or None).reshape(-1)
        for delta in folded.get(name, ()):
            apply(delta, flat)
        yield name, flat
    if missing:
        raise IntegrityError(
            f"anchor of version {plan.anchor.version}",
            expected=f"all {len(weights.tensors)} tensors of the served model",
            got=f"no {sorted(missing)[0]!r}",
            remedy="publish a complete anchor",
        )
    job.reading(None)
