"""How far trainer and server are apart, as the callback logs it, and resets as starting trainers answer them."""

from __future__ import annotations

import logging
import math
import uuid
from types import SimpleNamespace

import bucket
import grpo
import numpy as np
import pytest
import tiny
import torch
from stand_in_replica import StandInReplica

from delta_sync.claims import claim_reset
from delta_sync.ledger import AnchorRef, Ledger
from delta_sync.mismatch import mismatch
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback
from trl_callback.rollout_parity import batch_parity


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


def test_k3_by_hand() -> None:
    trainer, server = np.log([0.5, 0.2, 0.9]), np.log([0.5, 0.4, 0.9])
    found = mismatch(trainer, server, np.array([True, False, True]))
    k3 = 0.5 - 1 - math.log(0.5)
    assert found is not None and found.tokens == 3
    assert found.k3_max == pytest.approx(k3) and found.k3_mean == pytest.approx(k3 / 3)
    assert found.difference_max == pytest.approx(math.log(2)) and found.top1 == pytest.approx(2 / 3)
    assert mismatch(np.array([np.nan]), np.array([-1.0])) is None
    assert mismatch(np.array([-1.0, np.nan]), np.array([-1.0, -1.0])).tokens == 1


def test_only_what_the_model_wrote_counts() -> None:
    batch = {
        "old_per_token_logps": torch.tensor([[-1.0, -2.0, -9.0], [-1.0, -9.0, -9.0]]),
        "sampling_per_token_logps": torch.tensor([[-1.0, -1.0, 0.0], [-1.0, 0.0, float("nan")]]),
        "completion_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]),
        "tool_mask": torch.tensor([[1, 1, 1], [1, 0, 1]]),
    }
    found = batch_parity(SimpleNamespace(_buffered_inputs=[batch]))
    assert found is not None and found.tokens == 3 and found.difference_max == 1
    assert batch_parity(SimpleNamespace(_buffered_inputs=[{"completion_mask": batch["tool_mask"]}])) is None
    assert batch_parity(None) is None


def test_a_grpo_run_logs_it_every_so_many_steps(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=120, parity_every=2)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync])
        trainer.train()
    sync.close()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "loss" in entry}
    having = {step for step, entry in logged.items() if "delta_sync/parity_k3_mean" in entry}
    assert having == {2, 4}
    for step in having:
        mean, most = (logged[step][f"delta_sync/parity_k3_{name}"] for name in ("mean", "max"))
        apart = logged[step]["sampling/sampling_logp_difference/max"]  # TRL's own
        assert 0 < mean <= most <= math.expm1(apart) - apart + 1e-6


def test_where_trl_has_no_such_numbers_it_says_so_once_and_trains_on(tmp_path, uri: str, caplog) -> None:
    sync = DeltaSyncCallback(uri, parity_every=1)
    with caplog.at_level(logging.WARNING):
        grpo.plain_trainer(tmp_path, model=tiny.llama(), callbacks=[sync]).train()
    sync.close()
    assert caplog.text.count("parity_every is set") == 1
    assert bucket.chain(uri)[-1].steps[1] == 3  # it may publish two steps as one


@pytest.mark.parametrize("reset", [False, True])
def test_a_trainer_that_starts_after_a_reset_writes_complete_weights(tmp_path, uri: str, reset: bool) -> None:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=120)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync], max_steps=1
        )
        trainer.train()
        sync.sync()
        if reset:
            claim_reset(Ledger(open_store(uri)))
        trainer.train()
        sync.sync()
    sync.close()
    origin = [manifest for manifest in bucket.chain(uri) if manifest.kind == "origin"][-1]
    anchors = Ledger(open_store(uri)).anchors()  # the server has the very bits, so without a reset there is none
    assert (AnchorRef(origin.version, origin.epoch) in anchors) is reset
