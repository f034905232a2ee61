"""How a rank ends whose process groups are gloo's."""

from __future__ import annotations


def leave_groups() -> None:
    """End every process group while Python still runs.

    A thread of gloo's that lets go of a tensor while Python ends makes torch abort the process ("terminate called
    without an active exception"): of two ranks that did one collective, a third, with torch 2.13 and nothing of ours.
    """
    from torch import distributed

    if distributed.is_initialized():
        distributed.destroy_process_group()
