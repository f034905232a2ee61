"""When a replica says what it took, beside what its engine does then."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from vllm_delta_plugin import reporter
from vllm_delta_plugin.engine_commit import Committed
from vllm_delta_plugin.group import ALONE
from vllm_delta_plugin.reading import NOTHING
from vllm_delta_plugin.reporter import Reporter
from vllm_delta_plugin.status import Facts, Status
from vllm_delta_plugin.store_clock import StoreClock

TARGET = SimpleNamespace(
    run="run", version=7, epoch=1, sha256="0" * 64, state_digest="0" * 16, kind="delta", traceparent=None
)
STAGED: Any = SimpleNamespace(
    plan=SimpleNamespace(target=TARGET, start="position"),
    changed=3,
    read=NOTHING,
    began=1.0,
    seconds=0.5,
    proof_seconds=0.1,
)


@pytest.mark.parametrize("gap", [0.01, None])
def test_an_acknowledgement_does_not_begin_with_the_output_that_a_commit_made_late(
    gap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine hands that output on when the watch ends; where nothing is generated nobody is in the way."""
    done: list[Any] = []

    def watch() -> float | None:
        done.append("watched")
        return gap

    monkeypatch.setattr(reporter, "time", SimpleNamespace(time=time.time, sleep=lambda _: done.append("paused")))
    ledger: Any = SimpleNamespace(acknowledge=lambda ack: done.append(ack.version))
    status = Status(Facts("r", "file:///run", "m", "BF16", "processed_logprobs", "f"))
    report = Reporter(ledger, status, True, watch, StoreClock(), ALONE)
    report.committed(STAGED, Committed(1.7e9, 0.4), generation=1)
    assert status.served.version == 7 and not done, "what is served is said at once"
    assert status.counters.committed_at_last == 1.7e9, "and since when, which is not now"
    report.acknowledge()
    assert done == (["watched", "paused", 7] if gap else ["watched", 7])
    assert status.performance.get("gap_seconds") == gap
