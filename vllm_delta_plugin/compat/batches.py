"""Seam: the scheduler's two ends of a batch, between which a commit may fall.

A batch is computed by the weights that were live when it was scheduled: workers take its call before that of any
later commit. Under async scheduling and pipelining it returns when newer weights may be live already, so its label is
fixed where it leaves. It travels on in each output's ``trace_headers``, which every vLLM since 0.26 hands to the API
server untouched and reads only for "traceparent" and "tracestate".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.weights_label import LABEL

_MARK = "delta_sync_label"


def install() -> None:
    """Look whether the places are there; SeamError if not."""
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutput

    require(Scheduler, "schedule", "update_from_output", "has_unfinished_requests")
    require(EngineCoreOutput, "new_token_ids", "trace_headers")


def label_batches(scheduler: Any, label: Callable[[], str], returned: Callable[[str, bool], None]) -> None:
    """Mark every batch that ``scheduler`` makes from now on with ``label()``; at its end ``returned`` is told it.

    And whether it gave a token.
    """
    if hasattr(scheduler, _MARK):
        return
    require(scheduler, "schedule", "update_from_output", "has_unfinished_requests")
    schedule, update = scheduler.schedule, scheduler.update_from_output

    def schedule_marked(*args: Any, **kwargs: Any) -> Any:
        batch = schedule(*args, **kwargs)
        setattr(batch, _MARK, label())
        return batch

    def update_marked(batch: Any, *args: Any, **kwargs: Any) -> Any:
        clients = update(batch, *args, **kwargs)
        text = getattr(batch, _MARK, None)
        if text is not None:
            returned(text, sum(_mark(client.outputs, text) for client in clients.values()) > 0)
        return clients

    scheduler.schedule, scheduler.update_from_output = schedule_marked, update_marked
    setattr(scheduler, _MARK, True)


def _mark(outputs: list[Any], text: str) -> int:
    """How many of them have tokens."""
    mine = {LABEL: text}
    with_tokens = [output for output in outputs if output.new_token_ids]
    for output in with_tokens:
        output.trace_headers = {**output.trace_headers, **mine} if output.trace_headers else mine
    return len(with_tokens)
