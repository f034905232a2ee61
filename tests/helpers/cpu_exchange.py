"""What vLLM's CPU communicator lacks for data-parallel mixtures of experts, as a vLLM plugin that servers load.

Its base class only raises in ``all_gatherv`` and ``reduce_scatterv`` (0.32), so that the first forward pass of such an
engine fails on a CPU. With these two, everything else of vLLM's data parallelism runs here as it is.
"""

from __future__ import annotations

from typing import Any


def install() -> None:
    """Give the communicator both methods; called by vLLM in every process."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator

    communicator: Any = CpuCommunicator
    communicator.all_gatherv = all_gatherv
    communicator.reduce_scatterv = reduce_scatterv


def all_gatherv(self: Any, input_: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Every rank's rows, one rank after the other: ``[sizes[rank], ...]`` each (default: as many as here)."""
    import torch

    if isinstance(input_, list | tuple):
        return [all_gatherv(self, each, dim, sizes) for each in input_]
    assert dim == 0
    rows = sizes or [input_.shape[0]] * self.world_size
    padded = input_.new_zeros(max(rows), *input_.shape[1:])
    padded[: input_.shape[0]] = input_
    each = [torch.empty_like(padded) for _ in rows]
    torch.distributed.all_gather(each, padded, group=self.device_group)
    return torch.cat([part[:count] for part, count in zip(each, rows, strict=True)])


def reduce_scatterv(self: Any, input_: Any, dim: int = -1, sizes: list[int] | None = None) -> Any:
    """The sum over ranks of this rank's rows, ``[sizes[rank], ...]``, added up in float32."""
    import torch

    assert dim == 0
    rows = sizes or [input_.shape[0] // self.world_size] * self.world_size
    total = input_.float()
    torch.distributed.all_reduce(total, group=self.device_group)
    start = sum(rows[: self.rank_in_group])
    return total[start : start + rows[self.rank_in_group]].to(input_.dtype)
