"""A replica without an engine: the plugin's plan, stage, proof and swap on real storages, behind vLLM's routes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from end_to_end import weight_map
from sharded_memory import fingerprint
from stand_in_replica import StandInReplica

from delta_sync.plan import Plan
from trl_callback.extract import SIGNED
from vllm_delta_plugin.background import STAGING, Job
from vllm_delta_plugin.commit import device_of
from vllm_delta_plugin.proof import Layout, Proven, prove
from vllm_delta_plugin.stage import Rank, Staged, stage

LIMIT = 600.0


class ServedChain(StandInReplica):
    """Follows a run with the plugin's code in place of the stand-in's; ``fingerprints``: by step, of the live bits."""

    def __init__(self, uri: str, model: Any, *, vocab: int) -> None:
        self.fingerprints: dict[int, str] = {}
        super().__init__(uri, model, vocab=vocab)
        self._tensors = {name: torch.from_numpy(bits.view("<i2")).view(torch.bfloat16).reshape(self.layout[name][1])
                         for name, bits in self.live.items()}  # fmt: skip
        weights = weight_map(self._tensors)
        self._rank = Rank(weights, device_of(weights.storages), only_rank=True, limit=2**40)
        self._places = Layout(dict(self.layout), [weights.digests().keys()])
        self._proven = Proven.of(self._places, [weights.digests()])

    def _staged(self, plan: Plan) -> tuple[dict[str, np.ndarray], str]:
        """Stage, prove, swap; what is live then."""
        if plan.deltas:
            job: Job[Staged] = Job("stage", STAGING, lambda job: stage(job, self._rank, self.ledger, plan))
            job._thread.join(LIMIT)
            if job.result is None:
                raise job.error or TimeoutError("staging")
            self._proven = prove(
                self._places, self._proven.sums, [job.result.parts], plan.tensors, plan.target.state_digest
            )
            job.result.swap.swap(lambda: None)
        live = {name: t.view(SIGNED[2]).numpy().view("<u2").reshape(-1) for name, t in self._tensors.items()}
        self.fingerprints[plan.target.steps[1]] = fingerprint(live)
        return live, plan.target.state_digest
