"""Real transformers and TRL trainers over a memory store: after every step the bucket holds the model's cast bits."""

from __future__ import annotations

import logging
import uuid
from contextlib import nullcontext
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from delta_sync.context_codec import CONTEXT_CODEC
from delta_sync.delta_file import DEFAULT_CODEC as GAP
from delta_sync.errors import DeltaSyncError, MappingError, SyncTimeoutError
from trl_callback import DeltaSyncCallback, attach
from trl_callback.serving_image import ServingImage
from trl_callback.snapshot import Snapshot


class EveryStep(TrainerCallback):
    """After each step: flush, rebuild the newest version from the bucket alone, compare with the model."""

    def __init__(self, sync: DeltaSyncCallback) -> None:
        self.sync, self.checked = sync, 0
        self.start: list[Any] = []

    def on_init_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.start = list(Snapshot(ServingImage(model, lambda name: "BF16")))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        assert self.sync._session is not None
        self.sync._session._publisher.flush(120)
        manifest = bucket.newest(self.sync.config.uri)
        assert manifest.steps[1] == state.global_step and manifest.changed_elements > 0
        assert bucket.materialise(self.sync.config.uri, self.start) == bucket.cast_bytes(tiny.cast_state(model))
        self.checked += 1


@pytest.fixture
def uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


def checked(uri: str, **settings: Any) -> tuple[DeltaSyncCallback, EveryStep]:
    sync = DeltaSyncCallback(uri, sync_timeout=120, **settings)
    return sync, EveryStep(sync)


def replica_is_the_model(replica: StandInReplica, model: torch.nn.Module) -> bool:
    return {n: b.tobytes() for n, b in replica.live.items()} == bucket.cast_bytes(tiny.cast_state(model))


@pytest.mark.parametrize("build", [tiny.llama, tiny.qwen3_moe])
def test_a_plain_trainer_publishes_every_step(tmp_path, uri: str, build: Any) -> None:
    sync, every = checked(uri)
    trainer = grpo.plain_trainer(tmp_path, model=build(), callbacks=[sync, every], bf16=True)
    trainer.train()
    sync.close()
    assert every.checked == 3
    assert [m.kind for m in bucket.chain(uri)] == ["origin", "delta", "delta", "delta"]
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["delta_sync/version"] for entry in logged][-1] >= 2
    assert all({"delta_sync/extract_seconds", "delta_sync/bytes"} <= entry.keys() for entry in logged[1:])


def test_a_step_has_what_callbacks_before_ours_do_to_its_weights(tmp_path, uri: str) -> None:
    class Clip(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.clamp_(-0.01 * state.global_step, 0.01 * state.global_step)

    sync, every = checked(uri)
    trainer = grpo.plain_trainer(tmp_path, model=tiny.llama(), callbacks=[Clip(), sync, every], bf16=True)
    trainer.train()
    sync.close()
    assert every.checked == 3


def test_reporters_see_the_numbers_too(tmp_path, uri: str) -> None:
    seen: list[dict] = []

    class Reporter(TrainerCallback):
        """Stands before ours in the list, as wandb and trackio do."""

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    sync, every = checked(uri)
    grpo.plain_trainer(tmp_path, model=tiny.llama(), callbacks=[Reporter(), sync, every], bf16=True).train()
    sync.close()
    assert sum("delta_sync/changed_fraction" in logs for logs in seen) == 3


SUPERVISED = {
    "SFT": {"text": ["w5 w6 w7 w8", "w9 w10 w11"] * 4},
    "DPO": {"prompt": ["w5 w6"] * 8, "chosen": ["w7 w8"] * 8, "rejected": ["w9 w10"] * 8},
}


@pytest.mark.parametrize("method", SUPERVISED)
def test_other_trainers_publish_every_step(tmp_path, uri: str, method: str) -> None:
    import trl
    from datasets import Dataset

    sync, every = checked(uri)
    arguments = getattr(trl, f"{method}Config")(
        output_dir=str(tmp_path), max_steps=3, per_device_train_batch_size=2, learning_rate=1e-3, report_to=[],
        use_cpu=True, bf16=True, save_strategy="no", logging_steps=1, disable_tqdm=True, gradient_checkpointing=False,
        dataloader_pin_memory=False,
    )  # fmt: skip
    trainer = getattr(trl, f"{method}Trainer")(
        model=tiny.llama(), args=arguments, processing_class=tiny.tokenizer(), callbacks=[sync, every],
        train_dataset=Dataset.from_dict(SUPERVISED[method]), **({"ref_model": tiny.llama()} if method == "DPO" else {}),
    )  # fmt: skip
    trainer.train()
    sync.close()
    assert every.checked == 3
    assert "delta_sync/version" in trainer.state.log_history[1]


def test_grpo_with_the_callback_rolls_out_on_exactly_this_steps_weights(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync, every = checked(uri)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, every])
        trainer.train()
        sync.sync()
        assert replica_is_the_model(replica, trainer.model)
    sync.close()
    assert every.checked == 4
    assert replica.generated_at == [1, 2, 3, 4]  # version v + 1 holds the weights after step v
    assert replica.anchors_taken == 0  # the server's live bits were proven ours, so no anchor was written
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert all(entry["delta_sync/staleness"] == 0 and "delta_sync/wait_seconds" in entry for entry in logged)
    import trl.trainer.grpo_trainer as upstream
    from trl.generation.vllm_generation import VLLMGeneration

    assert upstream.VLLMGeneration is VLLMGeneration


def test_grpo_with_attach(tmp_path, uri: str) -> None:
    model = tiny.llama()
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=False)
        sync = attach(trainer, uri, sync_timeout=120)
        every = EveryStep(sync)
        every.on_init_end(None, None, None, model=model)
        trainer.add_callback(every)
        trainer.train()
    sync.close()
    assert every.checked == 4 and replica.generated_at == [1, 2, 3, 4]


def test_rollout_func_generates_through_us(tmp_path, uri: str) -> None:
    def rollout(prompts: list[str], trainer: Any) -> dict[str, Any]:
        ids = [trainer.processing_class(text=prompt)["input_ids"] for prompt in prompts]
        prompt_ids, completion_ids, logprobs, _ = trainer.vllm_generation.generate(
            prompts=ids, images=None, num_generations=1
        )
        flat = [[position[0] for position in sequence] for sequence in logprobs]
        return {"prompt_ids": prompt_ids, "completion_ids": completion_ids, "logprobs": flat}

    model = tiny.llama()
    sync, every = checked(uri)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, every], rollout_func=rollout
        )
        trainer.train()
    sync.close()
    assert every.checked == 4 and replica.generated_at == [1, 2, 3, 4]


def test_stale_rollouts_are_allowed_up_to_max_staleness_and_no_further(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=1.0, max_staleness=2)
    with StandInReplica(uri, model).running() as replica:

        class Pause(TrainerCallback):
            def on_pre_optimizer_step(self, *args: Any, **kwargs: Any) -> None:
                replica.paused.set()  # the first rollouts are there, the first step's version is not

        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, Pause()])
        with pytest.raises(SyncTimeoutError, match=rf"{replica.url}.*step 1\) served.*version [12];.*sync_timeout"):
            trainer.train()
    sync.close()
    assert 3 <= len(replica.generated_at) <= 4


def test_a_server_with_other_weights_takes_an_anchor_before_the_first_rollout(tmp_path, uri: str) -> None:
    model = tiny.llama(seed=1)
    sync, every = checked(uri)
    with StandInReplica(uri, tiny.llama(seed=2)).running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, every], max_steps=2
        )
        trainer.train()
    sync.close()
    assert replica.generated_at == [1, 2] and replica.anchors_taken == 1 and every.checked == 2


def test_a_new_trainer_on_a_used_bucket_takes_running_servers_along(tmp_path, uri: str) -> None:
    """The second trainer starts from other weights than the first one ended with."""
    served = tiny.llama()
    with StandInReplica(uri, served).running() as replica:
        for seed in (0, 5):
            sync, every = checked(uri)
            trainer = grpo.grpo_trainer(
                tmp_path, model=tiny.llama(seed=seed), url=replica.url, use_vllm=True, callbacks=[sync, every],
                max_steps=2,
            )  # fmt: skip
            trainer.train()
            sync.close()
    assert replica.generated_at == [1, 2, 4, 5]
    assert [(m.version, m.epoch, m.kind) for m in bucket.chain(uri)] == [
        (1, 1, "origin"), (2, 1, "delta"), (3, 1, "delta"), (4, 2, "origin"), (5, 2, "delta"), (6, 2, "delta"),
    ]  # fmt: skip


def test_an_exact_resume_needs_no_anchor_and_training_twice_works(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync, every = checked(uri)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, every], max_steps=2
        )
        trainer.train()
        sync.sync()
        trainer.train()
    sync.close()
    assert replica.anchors_taken == 0 and every.checked == 4
    assert [m.epoch for m in bucket.chain(uri)] == [1, 1, 1, 2, 2, 2]


def test_another_model_on_the_server_is_refused_by_name(tmp_path, uri: str) -> None:
    with StandInReplica(uri, tiny.llama(layers=1)).running() as replica:
        sync = DeltaSyncCallback(uri)
        trainer = grpo.grpo_trainer(
            tmp_path, model=tiny.llama(), url=replica.url, use_vllm=True, callbacks=[sync], max_steps=1
        )
        with pytest.raises(DeltaSyncError, match=r"'model\.layers\.1\..*no such tensor at http"):
            trainer.train()
    assert bucket.chain(uri) == []


def test_a_callback_added_too_late_says_what_to_do(tmp_path, uri: str) -> None:
    with StandInReplica(uri, tiny.llama()).running() as replica:
        sync = DeltaSyncCallback(uri)
        trainer = grpo.grpo_trainer(
            tmp_path,
            model=tiny.llama(),
            url=replica.url,
            use_vllm=True,
            callbacks=[sync],
            max_steps=1,
        )
        late = DeltaSyncCallback(uri)
        trainer.add_callback(late)
        with pytest.raises(DeltaSyncError, match=r"callbacks=\[…\].*attach"):
            trainer.train()
        with pytest.raises(DeltaSyncError, match="use_vllm=False"):
            attach(trainer, uri)
        sync.close()


def test_the_swap_serves_only_the_trainer_it_was_made_for(tmp_path, uri: str, monkeypatch) -> None:
    """A trainer that failed to be built leaves the swap in place; the next one, without us, gets TRL's own class."""
    import trl.trainer.grpo_trainer as upstream
    from trl.generation.vllm_generation import VLLMGeneration

    class Unlucky(TrainerCallback):
        def on_init_end(self, *args: Any, **kwargs: Any) -> None:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        callbacks = [DeltaSyncCallback(uri), Unlucky()]
        grpo.grpo_trainer(tmp_path, model=tiny.llama(), url="http://127.0.0.1:9", use_vllm=True, callbacks=callbacks)
    assert upstream.VLLMGeneration is not VLLMGeneration
    built: list[str] = []
    monkeypatch.setattr(VLLMGeneration, "_init_vllm", lambda self: built.append(type(self).__name__))
    grpo.grpo_trainer(
        tmp_path, model=tiny.llama(), url="http://127.0.0.1:9", use_vllm=True,
        vllm_importance_sampling_correction=False,
    )  # fmt: skip
    assert built == ["VLLMGeneration"] and upstream.VLLMGeneration is VLLMGeneration


@pytest.mark.parametrize("bf16, warned", [(False, True), (True, False)])
def test_other_precision_than_the_servers_is_warned_of(tmp_path, uri: str, caplog, bf16: bool, warned: bool) -> None:
    with caplog.at_level(logging.WARNING), StandInReplica(uri, tiny.llama()).running() as replica:
        sync = DeltaSyncCallback(uri)
        grpo.grpo_trainer(
            tmp_path, model=tiny.llama(), url=replica.url, use_vllm=True, callbacks=[sync], max_steps=1, bf16=bf16
        ).train()
    sync.close()
    assert ("computes in F32 but the server serves BF16" in caplog.text) is warned


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_server_that_follows_another_uri_is_warned_of_before_anybody_waits(
    tmp_path, uri: str, caplog, monkeypatch, elsewhere: bool
) -> None:
    monkeypatch.chdir(tmp_path)
    sync = DeltaSyncCallback("run", sync_timeout=3)  # a relative path is shown as an absolute one by both sides
    follows = StandInReplica(uri if elsewhere else str(tmp_path / "run"), tiny.llama())
    with caplog.at_level(logging.WARNING), follows.running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=tiny.llama(), url=replica.url, use_vllm=True, callbacks=[sync], max_steps=1
        )
        with pytest.raises(SyncTimeoutError) if elsewhere else nullcontext():
            trainer.train()
    assert (f"publishes to file://{tmp_path}/run but {replica.url} follows" in caplog.text) is elsewhere


def test_grpo_with_deltas_coded_against_the_old_bits(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync, every = checked(uri, codec="context")
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, every])
        trainer.train()
        sync.sync()
        assert replica_is_the_model(replica, trainer.model)
    sync.close()
    chain = bucket.chain(uri)
    assert every.checked == 4 and CONTEXT_CODEC in {m.codec for m in chain}


def test_a_server_that_cannot_decode_the_codec_is_refused_at_start(tmp_path, uri: str) -> None:
    model = tiny.llama()
    sync = DeltaSyncCallback(uri, codec="context")
    with StandInReplica(uri, model).running() as replica:
        replica.codecs = [GAP]
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync])
        with pytest.raises(MappingError, match="codec='gap'"):
            trainer.train()


def test_evaluation_before_training_waits_for_weights_too(tmp_path, uri: str) -> None:
    from datasets import Dataset

    model = tiny.llama()
    sync = DeltaSyncCallback(uri, sync_timeout=120)
    with StandInReplica(uri, tiny.llama(seed=3)).running() as replica:
        trainer = grpo.grpo_trainer(tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync])
        trainer.evaluate(Dataset.from_dict({"prompt": grpo.PROMPTS}))
        assert replica_is_the_model(replica, model)
    sync.close()
