"""Adapters as versions, rollouts that run ahead and several servers, all at once."""

from __future__ import annotations

import copy
import uuid
from contextlib import ExitStack
from typing import Any

import bucket
import grpo
import pytest
import tiny
from stand_in_replica import StandInReplica
from test_adapter_publishing import SERVED, EveryStep, lora, published

from delta_sync.errors import MappingError
from trl_callback import DeltaSyncCallback

pytest.importorskip("peft", reason="PEFT is not installed (extra peft)")


def fleet(stack: ExitStack, uri: str, base: Any, served: list[Any]) -> list[StandInReplica]:
    """One running replica for each entry, which says that of LoRA."""
    replicas = []
    for lora_served in served:
        replica = StandInReplica(uri, copy.deepcopy(base))
        replica.lora = lora_served
        replicas.append(stack.enter_context(replica.running()))
    return replicas


def test_a_fleet_of_adapters_runs_ahead(tmp_path: Any) -> None:
    uri, base, seen = f"memory://{uuid.uuid4().hex}", tiny.llama(), EveryStep()
    with ExitStack() as stack:
        replicas = fleet(stack, uri, base, [SERVED, SERVED])
        sync = DeltaSyncCallback(uri, server_url=[replica.url for replica in replicas], sync_timeout=120,
                                 lora="adapter", rollouts_ahead=1, max_staleness=1)  # fmt: skip
        trainer = grpo.grpo_trainer(
            tmp_path, model=base, url=None, use_vllm=True, callbacks=[sync, seen, grpo.AheadFirst(sync)],
            peft_config=lora(), max_steps=4, learning_rate=0.1, per_device_train_batch_size=16,
        )  # fmt: skip
        trainer.train()
        sync.close()
    versions = [manifest for manifest in bucket.chain(uri) if manifest.kind == "adapter"]
    assert [published(uri, manifest) for manifest in versions] == [seen.adapters[m.steps[1]] for m in versions]
    assert {record.ahead for record in sync.rollouts.batches} == {False, True}
    assert sync.rollouts.staleness == {0: 16, 1: 48}, "each completion's adapter is known, and one step old"
    of_each = [set(replica.generated_at) for replica in replicas]
    assert all(len(of_one) > 1 for of_one in of_each), "both took part, with more than one adapter"
    assert all(replica.anchors_taken == 0 for replica in replicas)


def test_one_server_that_cannot_have_the_adapter_is_named_at_the_start(tmp_path: Any) -> None:
    uri, base = f"memory://{uuid.uuid4().hex}", tiny.llama()
    with ExitStack() as stack:
        replicas = fleet(stack, uri, base, [SERVED, None])
        sync = DeltaSyncCallback(uri, server_url=[replica.url for replica in replicas], sync_timeout=120,
                                 lora="adapter", rollouts_ahead=1, max_staleness=1)  # fmt: skip
        trainer = grpo.grpo_trainer(tmp_path, model=base, url=None, use_vllm=True, callbacks=[sync], peft_config=lora())
        with pytest.raises(MappingError, match=f"{replicas[1].url}, which serves none"):
            trainer.train()
        sync.close()
    assert bucket.chain(uri) == [], "nothing was published"
