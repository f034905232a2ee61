"""Any order of failures and repairs: ranks never serve a mixture, and all is well once the last repair is made."""

from __future__ import annotations

import tempfile
import time
from typing import Any

import numpy as np
from engine_fakes import SHAPES, Weights
from helpers.publish import Publisher
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_coordinator import Replica, anchor

EVENTS = ("step", "content", "object", "heal", "anchor", "stage", "commit", "no faults", "resume", "wait")
FEW = settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])


def image(weights: Weights) -> bytes:
    return b"".join(np.ascontiguousarray(weights[name]).tobytes() for name in SHAPES)


class Run:
    """A trainer, a replica and a record of every state that was ever published."""

    def __init__(self, folder: str) -> None:
        random = np.random.default_rng(1)
        weights = {n: random.integers(0, 2**15, s).astype("<u2") for n, s in SHAPES.items()}
        self.uri = f"{folder}/run"
        self.trainer = Publisher(self.uri, weights)
        self.trainer.origin()
        self.known = {image(self.trainer.weights)}
        self.mixed: list[str] = []
        self.seed = 0
        self.replica = Replica(self.uri, weights, audit_commits=3)
        self.replica.executor.before = self.look
        self.replica.start()

    def look(self, method: str) -> None:
        """Outside of a commit both ranks hold the same, published bits."""
        if method in ("stage_begin", "commit", "audit_begin"):
            images = {image(rank.live) for rank in self.replica.executor.ranks}
            if len(images) != 1 or not images <= self.known:
                self.mixed.append(method)

    def do(self, event: str) -> None:
        self.seed += 1
        ranks, head = self.replica.executor.ranks, self.trainer.writer.head
        if event in ("step", "content", "object"):
            self.trainer.change(self.seed, 0.3)
            self.known.add(image(self.trainer.weights))
            self.trainer.delta(None if event == "step" else event)
        elif event == "heal" and self.trainer.objects.get(head.version):
            self.trainer.heal(head)
        elif event == "anchor":
            anchor(self.trainer, head)
        elif event in ("stage", "commit"):
            ranks[self.seed % 2].fail = {event}
        elif event == "no faults":
            for rank in ranks:
                rank.fail = set()
        elif event == "resume":
            self.trainer = Publisher(self.uri, {n: v ^ 5 for n, v in self.trainer.weights.items()})
            self.known.add(image(self.trainer.weights))
            self.trainer.origin()
        elif event == "wait":
            time.sleep(0.1)

    def end_well(self) -> dict[str, Any]:
        self.do("no faults")
        self.do("step")
        self.do("anchor")
        newest = self.trainer.writer.head.version
        return self.replica.wait("the newest version", lambda s: s["version"] == newest and s["state"] == "live", 30)


@FEW
@given(st.lists(st.sampled_from(EVENTS), max_size=12))
def test_ranks_never_mix_versions_and_always_recover(events: list[str]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Run(folder)
        try:
            for event in events:
                run.do(event)
            run.end_well()
            live = {image(rank.live) for rank in run.replica.executor.ranks}
            assert live == {image(run.trainer.weights)}
            assert run.mixed == []
            assert run.replica.broken is None
        finally:
            run.replica.close()
