"""Whatever a run's schedule is, each version holds its step's weights and the newest those trained last."""

from __future__ import annotations

import uuid
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from datasets import Dataset
from kept import KeepSteps
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from trl_callback import DeltaSyncCallback


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


class EvaluateAfter(TrainerCallback):
    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps = steps

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        control.should_evaluate = state.global_step in self.steps
        return control


NO_ANCHORS = {"anchor_every": 0, "anchor_chain_ratio": 0.0}  # so that every version is looked at from the start on


def roll_out(
    folder: Any, uri: str, steps: int, *, evaluate_after: tuple[int, ...] = (), **settings: Any
) -> tuple[StandInReplica, list[Any]]:
    """A GRPO run of ``steps``; its replica, which ends with the trained bits, and its manifests, each proven."""
    model, keep = tiny.llama(), KeepSteps()
    sync = DeltaSyncCallback(uri, sync_timeout=120, **NO_ANCHORS)
    callbacks = [sync, keep, EvaluateAfter(evaluate_after)]
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            folder, model=model, url=replica.url, use_vllm=True, callbacks=callbacks, max_steps=steps, **settings
        )
        trainer.eval_dataset = Dataset.from_dict({"prompt": grpo.PROMPTS[:1]})
        trainer.train()
        sync.sync()  # the trainer's last step, which no rollout asked for
    sync.close()
    assert {name: bits.tobytes() for name, bits in replica.live.items()} == bucket.cast_bytes(keep.steps[steps])
    assert replica.anchors_taken == 0
    return replica, keep.check(uri, steps)


def test_gradient_accumulation_publishes_once_a_step(tmp_path, uri: str) -> None:
    replica, seen = roll_out(tmp_path, uri, 3, gradient_accumulation_steps=2)
    assert [m.steps for m in seen] == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert replica.generated_at == [1, 2, 3]  # a batch of rollouts feeds both halves of its step


def test_rollouts_used_for_several_steps_are_waited_for_once(tmp_path, uri: str) -> None:
    """steps_per_generation=4 with accumulation 2: every second step trains on what is there."""
    replica, seen = roll_out(tmp_path, uri, 5, gradient_accumulation_steps=2, steps_per_generation=4)
    assert len(replica.generated_at) == 3
    assert replica.generated_at[0] == 1 and [m.steps[1] for m in seen if m.version in replica.generated_at] == [0, 2, 4]


def test_evaluation_in_the_middle_rolls_out_on_the_step_it_is_at(tmp_path, uri: str) -> None:
    sizes = {"num_generations_eval": 4, "per_device_eval_batch_size": 4}
    replica, seen = roll_out(tmp_path, uri, 4, evaluate_after=(2, 4), **sizes)
    at = {m.version: m.steps[1] for m in seen}
    assert [at[version] for version in replica.generated_at] == [0, 1, 2, 2, 3, 4]  # evaluations after steps 2 and 4


@pytest.mark.parametrize("schedule", ["cosine", "constant_with_warmup"])
def test_a_changing_learning_rate(tmp_path, uri: str, schedule: str) -> None:
    """A warm-up's first step has rate 0: a version without changes, which rollouts don't wait for in vain."""
    roll_out(tmp_path, uri, 3, lr_scheduler_type=schedule, warmup_steps=2)
    assert [bool(m.changed_elements) for m in bucket.chain(uri)] == [False, False, True, True]  # of steps 0 to 3


def test_max_steps_in_the_middle_of_an_epoch_and_several_epochs(tmp_path, uri: str) -> None:
    roll_out(tmp_path, uri, 7, num_train_epochs=1)  # 16 prompts of 4 completions, 4 at a time: 16 steps an epoch
    model, keep, other = tiny.llama(), KeepSteps(), f"memory://{uuid.uuid4().hex}"
    sync = DeltaSyncCallback(other, **NO_ANCHORS)
    trainer = grpo.plain_trainer(tmp_path, model=model, callbacks=[sync, keep], steps=-1, num_train_epochs=2, bf16=True)
    trainer.train()
    sync.close()
    keep.check(other, 8)


def test_versions_further_apart_end_with_the_last_step_all_the_same(tmp_path, uri: str) -> None:
    model, keep = tiny.llama(), KeepSteps()
    sync = DeltaSyncCallback(uri, publish_every=3, **NO_ANCHORS)
    grpo.plain_trainer(tmp_path, model=model, callbacks=[sync, keep], steps=5, bf16=True).train()
    sync.close()
    assert {m.steps[1] for m in keep.check(uri, 5)} <= {0, 3, 5}  # 3 may come with 5, while the origin is written


class Overflow(TrainerCallback):
    """Makes the gradients of some steps infinite, before the scaler looks at them."""

    def __init__(self, steps: set[int]) -> None:
        self.steps = steps

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if state.global_step + 1 in self.steps:
            next(model.parameters()).grad.fill_(torch.inf)


def test_steps_that_the_gradient_scaler_skips(tmp_path, uri: str) -> None:
    """As float16 does on a GPU: accelerate's own optimizer, with torch's scaler, leaves such a step out."""
    model, keep = tiny.llama(), KeepSteps()
    sync = DeltaSyncCallback(uri, serving_dtype="BF16", **NO_ANCHORS)
    trainer = grpo.plain_trainer(
        tmp_path, model=model, callbacks=[Overflow({2, 3, 5}), sync, keep], steps=5, max_grad_norm=0.0,
        lr_scheduler_type="constant",
    )  # fmt: skip
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.train()
    sync.close()
    assert all(torch.equal(keep.steps[1][name], keep.steps[3][name]) for name in keep.steps[1])
    assert any(not torch.equal(keep.steps[3][name], keep.steps[4][name]) for name in keep.steps[1])
    seen = keep.check(uri, 5)
    assert {m.steps[1]: m.changed_elements for m in seen}[5] == 0 or seen[-1].steps[0] < 5
