"""Rollouts that run ahead: the same prompts in the same order, at most so stale, and nothing left running."""

from __future__ import annotations

import threading
import time
import uuid
from collections import Counter
from typing import Any

import grpo
import pytest
import tiny
from datasets import Dataset
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from delta_sync.errors import DeltaSyncError, SyncTimeoutError
from trl_callback import DeltaSyncCallback, attach


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


class Asked(StandInReplica):
    """Remembers what it was asked for, and can hold its answers back."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.prompts: list[list[list[int]]] = []
        self.answering = threading.Event()
        self.answering.set()
        self.asked = threading.Condition()

    def complete(self, body: Any) -> tuple[int, Any]:
        with self.asked:
            self.prompts.append(body["prompt"])
            self.asked.notify_all()
        self.answering.wait(60)
        return super().complete(body)

    def wait_asked(self, times: int, timeout: float = 30) -> bool:
        with self.asked:
            return self.asked.wait_for(lambda: len(self.prompts) >= times, timeout)


def train(
    folder: Any, uri: str, *, ahead: int, more: list[TrainerCallback] | None = None, staleness: int = 1, **settings: Any
) -> tuple[Asked, DeltaSyncCallback, Any]:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=120, rollouts_ahead=ahead, max_staleness=staleness if ahead else 0)
    with Asked(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            folder,
            model=model,
            url=replica.url,
            use_vllm=True,
            **settings,
            callbacks=[sync, *([grpo.AheadFirst(sync)] if ahead and not more else []), *(more or [])],
        )
        for one in more or []:
            one.replica = replica  # type: ignore[attr-defined]
        try:
            trainer.train()
        finally:
            sync.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "delta-sync-ahead"]
    return replica, sync, trainer


class NextIsAskedFor(TrainerCallback):
    """Holds every optimizer step until the servers have been asked for the batch after it."""

    replica: Asked

    def __init__(self, last: int) -> None:
        self.last, self.saw = last, 0

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step < self.last:
            assert self.replica.wait_asked(state.global_step + 2)
            self.saw += 1


def test_the_next_batch_is_generated_while_the_trainer_steps(tmp_path, uri: str) -> None:
    held = NextIsAskedFor(last=3)
    replica, sync, trainer = train(tmp_path, uri, ahead=1, more=[held])
    assert held.saw == 3 and len(replica.prompts) == 4  # and none for a fifth step, which will not come
    records = list(sync.rollouts.batches)
    assert [(record.step, record.ahead) for record in records] == [(0, False), (1, True), (2, True), (3, True)]
    assert [set(record.made) for record in records] == [{0}, {0}, {1}, {2}]
    assert sync.rollouts.staleness == Counter({0: 4, 1: 12})
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["delta_sync/staleness"] for entry in logged] == [0, 1, 1, 1]
    assert all("sampling/sampling_logp_difference/mean" in entry for entry in logged)


@pytest.mark.parametrize(
    "settings",
    [
        {"max_steps": 5},
        {"max_steps": -1, "num_train_epochs": 2, "per_device_train_batch_size": 16},  # a batch is a quarter of an epoch
        {"gradient_accumulation_steps": 2, "max_steps": 4},
        {"gradient_accumulation_steps": 2, "steps_per_generation": 1, "max_steps": 3},  # two generations a step
        {"steps_per_generation": 2, "num_iterations": 2, "max_steps": 9},  # one generation for four steps
    ],
)
def test_prompts_and_metrics_are_those_of_a_run_without(tmp_path, uri: str, settings: dict[str, Any]) -> None:
    stale = settings.get("steps_per_generation", 1) * settings.get("num_iterations", 1)
    without, _, plain = train(tmp_path / "0", uri + "0", ahead=0, **settings)
    with_it, sync, trainer = train(tmp_path / "1", uri + "1", ahead=1, staleness=stale, **settings)
    assert with_it.prompts == without.prompts and len(with_it.prompts) >= 3
    assert max(sync.rollouts.staleness) == stale
    assert sum(sync.rollouts.staleness.values()) == 4 * sum(map(len, with_it.prompts))
    ours, theirs = trainer.state.log_history, plain.state.log_history
    assert [entry.get("num_tokens") for entry in ours] == [entry.get("num_tokens") for entry in theirs]
    assert [entry.get("completions/mean_length") for entry in ours] == [
        entry.get("completions/mean_length") for entry in theirs
    ]
    assert trainer.state.num_input_tokens_seen == plain.state.num_input_tokens_seen


def test_an_evaluation_in_between_disturbs_nothing(tmp_path, uri: str) -> None:
    evaluated = {
        "eval_strategy": "steps",
        "eval_steps": 1,
        "per_device_eval_batch_size": 4,
        "given": {"eval_dataset": Dataset.from_dict({"prompt": grpo.PROMPTS[:1]})},
    }
    without, _, _ = train(tmp_path / "0", uri + "0", ahead=0, max_steps=3, **evaluated)
    with_it, _, trainer = train(tmp_path / "1", uri + "1", ahead=1, max_steps=3, **evaluated)
    assert sorted(with_it.prompts) == sorted(without.prompts)
    assert len([entry for entry in trainer.state.log_history if "eval_reward" in entry]) == 3


class StopAt(TrainerCallback):
    replica: Asked

    def __init__(self, step: int, error: type[BaseException] | None) -> None:
        self.step, self.error = step, error

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step - 1:
            self.replica.answering.clear()  # of the batch that begins in the step that will be the last
        if state.global_step == self.step:
            assert self.replica.wait_asked(self.step + 1)
            control.should_training_stop = True
            if self.error is not None:
                raise self.error


@pytest.mark.parametrize("error", [None, ZeroDivisionError, KeyboardInterrupt])
def test_however_training_ends_nothing_keeps_streaming(tmp_path, uri: str, error: Any) -> None:
    began: list[float] = []

    class Ending(StopAt):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                # The answer to the batch that is used in the second step is there before the rest is held back.
                assert self.replica.wait_asked(2)
                while len(self.replica.generated_at) < 2:
                    time.sleep(0.01)
            began.append(time.monotonic())
            super().on_step_end(args, state, control, **kwargs)

    if error is None:
        train(tmp_path, uri, ahead=1, more=[Ending(2, None)], max_steps=8)
    else:
        with pytest.raises(error):
            train(tmp_path, uri, ahead=1, more=[Ending(2, error)], max_steps=8)
    assert time.monotonic() - began[-1] < 20
    assert not [thread for thread in threading.enumerate() if thread.name == "delta-sync-ahead"]


def test_what_stops_the_rollouts_stops_training(tmp_path, uri: str) -> None:
    class Away(TrainerCallback):
        replica: Asked

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                self.replica.server.routes["POST /v1/completions"] = lambda _: (400, {"error": {"message": "no more"}})

    with pytest.raises(DeltaSyncError, match="no more"):
        train(tmp_path, uri, ahead=1, more=[Away()])


def test_weights_that_are_never_served_end_at_the_deadline(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=2, rollouts_ahead=1, max_staleness=1)

    class Pause(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            replica.paused.set()

    with Asked(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[Pause(), sync])
        with pytest.raises(SyncTimeoutError, match=r"step 1.*served within 2 s"):
            trainer.train()
    sync.close()


def test_a_completion_that_is_older_than_allowed_is_generated_anew(tmp_path, uri: str, caplog) -> None:
    """A server that says it used other weights than it was asked for: an operator's rollback, say."""
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=120, rollouts_ahead=1, max_staleness=1)

    class Liar(Asked):
        def complete(self, body: Any) -> tuple[int, Any]:
            status, answer = super().complete(body)
            if len(self.prompts) == 3:
                answer["usage"]["delta_sync"]["choices"][2][0]["version"] = 1
            return status, answer

    with Liar(uri, model).running() as replica:
        grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, grpo.AheadFirst(sync)]
        ).train()
    sync.close()
    assert "older than max_staleness allows" in caplog.text
    assert len(replica.prompts) == 5 and replica.prompts[2] == replica.prompts[3]
    assert [record.ahead for record in sync.rollouts.batches] == [False, True, False, True]
    assert max(sync.rollouts.staleness) == 1


def test_training_goes_on_and_again_and_attached_trainers_run_ahead_too(tmp_path, uri: str) -> None:
    model = tiny.llama()
    with Asked(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=False, max_steps=2)
        sync = attach(trainer, uri, server_url=replica.url, sync_timeout=120, rollouts_ahead=1, max_staleness=1)
        trainer.train()
        trainer.train()
        sync.close()
    assert [record.ahead for record in sync.rollouts.batches] == [False, True] * 2
    assert "get_batch_samples" not in vars(trainer)


def test_settings_that_cannot_work_are_named(tmp_path, uri: str) -> None:
    with pytest.raises(DeltaSyncError, match=r"max_staleness.*at least 1"):
        DeltaSyncCallback(uri, rollouts_ahead=1)
    with pytest.raises(DeltaSyncError, match=r"rollouts_ahead.*0 or 1"):
        DeltaSyncCallback(uri, rollouts_ahead=2, max_staleness=2)
    with pytest.raises(DeltaSyncError, match=r"max_staleness.*at least 4"):
        train(tmp_path, uri, ahead=1, steps_per_generation=2, num_iterations=2)
    sync = DeltaSyncCallback(uri, rollouts_ahead=1, max_staleness=1)
    with pytest.raises(DeltaSyncError, match=r"rollouts_ahead=1.*rolls out elsewhere"):
        grpo.plain_trainer(tmp_path, model=tiny.llama(), callbacks=[sync]).train()
    sync.close()
