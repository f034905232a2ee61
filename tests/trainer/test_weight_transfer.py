"""TRL's own AsyncGRPOTrainer, its weights through the bucket: all but its forward pass, which needs a GPU kernel."""

from __future__ import annotations

import copy
import inspect
import queue
import uuid
from pathlib import Path
from typing import Any

import bucket
import pytest
import tiny
import torch
from datasets import Dataset
from stand_in_replica import StandInReplica

from delta_sync.errors import MappingError, SyncTimeoutError
from trl_callback import DeltaSyncCallback
from trl_callback.weight_transfer import DeltaSyncWeightTransfer

async_grpo = pytest.importorskip("trl.experimental.async_grpo")


@pytest.fixture(autouse=True)
def a_device_with_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL looks up what the GPU can do by its name; nothing else of CUDA is needed to build the trainer."""
    monkeypatch.setattr("torch.cuda.get_device_name", lambda *_: "none")


class Worker:
    """Stands in for TRL's rollout worker, a child process: notes which policy version it is told of, and when."""

    def __init__(self, replica: StandInReplica) -> None:
        self.rollout_buffer: queue.Queue[Any] = queue.Queue()
        self.metrics_queue: queue.Queue[Any] = queue.Queue()
        self.replica, self.told = replica, list[tuple[int, Any]]()

    def start(self) -> None:
        self.told.append((0, self.served()))

    def stop(self) -> None:
        self.told.append((-1, self.served()))

    def update_model_version(self, model_version: int) -> None:
        self.told.append((model_version, self.served()))

    def served(self) -> int | None:
        return self.replica.position and self.replica.position.version

    def check_health(self, stale_after_s: float) -> None:
        """Nothing to be ill."""


def build(**given: Any) -> Any:
    """TRL's trainer; older ones load their attention kernel from the Hub when they are built, not when they train."""
    try:
        return async_grpo.AsyncGRPOTrainer(**given)
    except ImportError as error:
        if "kernels" not in str(error):
            raise
        pytest.skip(f"this TRL builds it only with a kernel from the Hub: {error}")


def trainer_of(
    folder: Path, replica: StandInReplica, sync: DeltaSyncCallback, peft_config: Any = None, **settings: Any
) -> tuple[Any, Worker]:
    tiny.llama().save_pretrained(folder / "model")
    tiny.tokenizer().save_pretrained(folder / "model")
    worker = Worker(replica)
    arguments = async_grpo.AsyncGRPOConfig(
        output_dir=str(folder / "out"), use_cpu=True, bf16=True, report_to=[], max_steps=2,
        vllm_server_base_url=replica.url, **settings,
    )  # fmt: skip
    trainer = build(
        model=str(folder / "model"),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": [[{"role": "user", "content": "w5"}]]}),
        processing_class=tiny.tokenizer(),
        callbacks=[sync],
        **({} if peft_config is None else {"peft_config": peft_config}),
        rollout_worker=worker,
        weight_transfer=sync.weight_transfer(),
    )
    callbacks = trainer.callback_handler.callbacks  # without the one that measures a training loop, which is not run
    callbacks[:] = [one for one in callbacks if getattr(one, "fn", None) != trainer._log_step_metrics]
    return trainer, worker


def event(trainer: Any, name: str) -> None:
    """What transformers' training loop does at this point, all of TRL's and our callbacks in their order."""
    getattr(trainer.callback_handler, name)(trainer.args, trainer.state, trainer.control)


def test_the_policy_is_served_when_the_worker_is_told_of_it(tmp_path: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    sync = DeltaSyncCallback(uri, sync_timeout=120)
    with StandInReplica(uri, tiny.llama()).running() as replica:
        trainer, worker = trainer_of(tmp_path, replica, sync)
        event(trainer, "on_train_begin")
        for step in (1, 2):
            tiny.nudge(trainer.model, seed=step)
            trainer.state.global_step = step
            event(trainer, "on_step_end")
            served = {name: bits.tobytes() for name, bits in replica.live.items()}
            assert served == bucket.cast_bytes(tiny.cast_state(trainer.model))
        event(trainer, "on_train_end")
        sync.close()
    told = [one for one in worker.told if one[0] > 0]
    assert told == [(1, 1), (2, 2), (3, 3)] and trainer.model_version == 3
    assert worker.told.index((0, 1)) == 1, "it starts once the first weights are served"


@pytest.fixture
def lora() -> Any:
    """Adapters on all that AsyncGRPOTrainer takes them on."""
    peft = pytest.importorskip("peft")
    if "peft_config" not in inspect.signature(async_grpo.AsyncGRPOTrainer.__init__).parameters:
        pytest.skip("this TRL's AsyncGRPOTrainer trains no adapters")
    return peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")


def bits_of(model: Any) -> dict[str, bytes]:
    """Every parameter's, the adapter's too."""
    return {name: parameter.detach().numpy().tobytes() for name, parameter in model.named_parameters()}


def train_adapter(model: Any, *, seed: int) -> None:
    """As an optimizer does: of both halves, so that they add up to something."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(torch.randn_like(parameter) * 1e-2)


def test_a_sync_leaves_the_weights_under_an_adapter_as_they_are(tmp_path: Path, lora: Any) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    sync = DeltaSyncCallback(uri, sync_timeout=120)
    with StandInReplica(uri, tiny.llama()).running() as replica:
        trainer, _ = trainer_of(tmp_path, replica, sync, lora)
        event(trainer, "on_train_begin")
        for step in (1, 2, 3):
            train_adapter(trainer.model, seed=step)
            trained = bits_of(trainer.model)
            trainer.state.global_step = step
            event(trainer, "on_step_end")
            assert bits_of(trainer.model) == trained
            served = {name: bits.tobytes() for name, bits in replica.live.items()}
            merged = copy.deepcopy(trainer.model).merge_and_unload()
            assert served == bucket.cast_bytes(tiny.cast_state(merged))
        event(trainer, "on_train_end")
        sync.close()
    trainer.model.merge_adapter()
    assert bits_of(trainer.model) != trained, "the user's own merges work"


def test_after_a_sync_that_failed_adapters_can_be_merged(
    tmp_path: Path, lora: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    sync = DeltaSyncCallback(uri, sync_timeout=120)
    with StandInReplica(uri, tiny.llama()).running() as replica:
        trainer, _ = trainer_of(tmp_path, replica, sync, lora)
        event(trainer, "on_train_begin")
        train_adapter(trainer.model, seed=1)
        trained = bits_of(trainer.model)
        monkeypatch.setattr(trainer, "_streaming_iter", lambda: (_ for _ in ()).throw(RuntimeError("a lost card")))
        trainer.state.global_step = 1
        with pytest.raises(RuntimeError, match="a lost card"):
            event(trainer, "on_step_end")
        sync.close()
    assert bits_of(trainer.model) == trained
    trainer.model.merge_adapter()
    assert bits_of(trainer.model) != trained


def test_a_server_that_does_not_follow_ends_at_the_deadline(tmp_path: Path) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    sync = DeltaSyncCallback(uri, sync_timeout=1)
    with StandInReplica(uri, tiny.llama()).running() as replica:
        trainer, worker = trainer_of(tmp_path, replica, sync)
        event(trainer, "on_train_begin")
        replica.paused.set()
        tiny.nudge(trainer.model, seed=1)
        trainer.state.global_step = 1
        with pytest.raises(SyncTimeoutError):
            event(trainer, "on_step_end")
        sync.close()
    assert max(version for version, _ in worker.told) == 1, "the policy's version was not counted up"


def test_it_has_all_that_trls_protocol_names() -> None:
    from trl.experimental.async_grpo.async_grpo_trainer import WeightTransferProtocol

    named = [name for name, _ in inspect.getmembers(WeightTransferProtocol, inspect.isfunction) if name[0] != "_"]
    assert named and set(named) <= set(dir(DeltaSyncWeightTransfer))
    for name in named:
        theirs, ours = (
            inspect.signature(getattr(one, name)) for one in (WeightTransferProtocol, DeltaSyncWeightTransfer)
        )
        assert list(theirs.parameters) == list(ours.parameters)


def test_a_trl_without_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Later:
        def __init__(self, model: Any) -> None:
            """As a later TRL's may be."""

    monkeypatch.setattr(async_grpo, "AsyncGRPOTrainer", Later)
    with pytest.raises(MappingError, match=r"takes weight_transfer=.*no such parameter.*rollouts_ahead=1"):
        DeltaSyncCallback("memory://x").weight_transfer()
