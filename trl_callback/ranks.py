"""Rank 0 publishes; every rank goes on, or stops, together."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import distributed

from delta_sync.errors import DeltaSyncError


def is_main() -> bool:
    """Whether this process is the one that publishes."""
    return not many_ranks() or distributed.get_rank() == 0


def on_main(work: Callable[[], object]) -> None:
    """Run ``work`` on rank 0 while the others wait; what it raises there makes every rank raise.

    A collective: every rank must call it at the same point. Nothing but one flag travels between ranks.
    """
    if not many_ranks():
        work()
        return
    failure: BaseException | None = None
    if distributed.get_rank() == 0:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 (raised below, once the others know)
            failure = error
    if _any_failed(failure is not None):
        raise failure or DeltaSyncError(
            f"rank {distributed.get_rank()}", expected="rank 0 to publish", got="a failure on rank 0",
            remedy="see rank 0's error",
        )  # fmt: skip


def many_ranks() -> bool:
    """Whether this process trains together with others."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def _any_failed(failed: bool) -> bool:
    on_gpu = distributed.get_backend() == "nccl"
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    flag = torch.tensor([int(failed)], device=device)
    distributed.all_reduce(flag, op=distributed.ReduceOp.MAX)
    return bool(flag.item())
