"""Training that ends before its time, or goes on from a checkpoint: the last whole step's weights are published."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from kept import KeepSteps
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from delta_sync.adapter import read_adapter
from delta_sync.ledger import Ledger
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback

CHILD = Path(__file__).parent / "interrupted_child.py"


@pytest.mark.parametrize(
    ("what", "every", "code", "lora"),
    [("exception", 1, 1, "merged"), ("interrupt", 10, -signal.SIGINT, "merged"), ("torn", 10, 1, "merged"),
     ("exception", 10, 1, "adapter"), ("torn", 10, 1, "adapter")],
)  # fmt: skip
def test_a_trainer_that_is_ended_publishes_its_last_whole_step_first(
    tmp_path, what: str, every: int, code: int, lora: str
) -> None:
    """The store is slower than the trainer, and with ``every`` 10 only the exit publishes; torn weights never are."""
    uri = str(tmp_path / "bucket")
    child = subprocess.Popen(
        [sys.executable, str(CHILD), str(tmp_path), uri, what, str(every), lora],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        if what == "interrupt":
            assert any("in step 4" in line for line in child.stdout)
            child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=120)
    finally:
        child.kill()
    assert child.returncode == code, errors[-3000:]
    newest = bucket.newest(uri)
    if what == "torn":
        assert newest.steps == (0, 0)
        return
    assert newest.steps[1] == 3, errors[-3000:]
    trained = torch.load(tmp_path / "step-3.pt", weights_only=True)
    assert published(uri, newest) == bucket.cast_bytes(trained)


def published(uri: str, newest: Any) -> dict[str, bytes]:
    """The newest version: the model's weights, or the adapter where it is one."""
    if newest.kind != "adapter":
        return bucket.materialise(uri)
    tensors = read_adapter(Ledger(open_store(uri)), newest).tensors
    return {name: tensor[3].tobytes() for name, tensor in tensors.items()}


class Failing(TrainerCallback):
    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            raise KeyboardInterrupt


def test_in_a_process_that_lives_on_the_last_step_is_published_and_training_can_begin_again(tmp_path) -> None:
    """As in a notebook: nobody exits, nobody closes anything."""
    uri = f"memory://{uuid.uuid4().hex}"
    model, keep = tiny.llama(), KeepSteps()
    sync = DeltaSyncCallback(uri, sync_timeout=120, anchor_every=0, anchor_chain_ratio=0.0)
    with StandInReplica(uri, model).running() as replica:
        trainer = grpo.grpo_trainer(
            tmp_path, model=model, url=replica.url, use_vllm=True, callbacks=[sync, keep, failing := Failing()]
        )
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
        sync._session._publisher.wait_covering(2, 30)
        keep.check(uri, 2)
        trainer.remove_callback(failing)
        trainer.train()
        sync.sync()
        live = {name: bits.tobytes() for name, bits in replica.live.items()}
    sync.close()
    assert live == bucket.cast_bytes(keep.steps[4])
    assert [m.epoch for m in bucket.chain(uri)] == [1, 1, 1, 2, 2, 2, 2, 2]


def test_a_resumed_run_takes_server_and_bucket_back_to_its_checkpoint(tmp_path) -> None:
    """The first run goes on after its checkpoint; the second begins an epoch from it, with complete weights."""
    uri = f"memory://{uuid.uuid4().hex}"
    served = tiny.llama()
    kept = [KeepSteps(), KeepSteps()]
    with StandInReplica(uri, served).running() as replica:
        for keep, steps, resume in zip(kept, (3, 5), (None, str(tmp_path / "checkpoint-2")), strict=True):
            sync = DeltaSyncCallback(uri, sync_timeout=120, anchor_every=0, anchor_chain_ratio=0.0)
            trainer = grpo.grpo_trainer(
                tmp_path, model=tiny.llama(), url=replica.url, use_vllm=True, callbacks=[sync, keep], max_steps=steps,
                save_strategy="steps", save_steps=2, lr_scheduler_type="constant",
            )  # fmt: skip
            trainer.train(resume_from_checkpoint=resume)
            sync.sync()
            sync.close()
        live = {name: bits.tobytes() for name, bits in replica.live.items()}
    chain = bucket.chain(uri)
    assert [(m.epoch, m.kind, m.steps) for m in chain] == [
        (1, "origin", (0, 0)), (1, "delta", (1, 1)), (1, "delta", (2, 2)), (1, "delta", (3, 3)),
        (2, "origin", (2, 2)), (2, "delta", (3, 3)), (2, "delta", (4, 4)), (2, "delta", (5, 5)),
    ]  # fmt: skip
    assert bucket.cast_bytes(kept[1].steps[2]) == bucket.cast_bytes(kept[0].steps[2])
    assert replica.anchors_taken == 1 and replica.generated_at == [1, 2, 3, 5, 6, 7]
    assert live == bucket.materialise(uri) == bucket.cast_bytes(kept[1].steps[5])


def test_a_run_resumed_without_a_server_puts_complete_weights_into_the_bucket(tmp_path) -> None:
    """A server started later has something to start from that is the resumed run's."""
    uri = f"memory://{uuid.uuid4().hex}"
    for steps, resume in ((3, None), (5, str(tmp_path / "checkpoint-2"))):
        sync, keep = DeltaSyncCallback(uri, anchor_every=0, anchor_chain_ratio=0.0), KeepSteps()
        grpo.plain_trainer(
            tmp_path, model=tiny.llama(), callbacks=[sync, keep], steps=steps, bf16=True, save_strategy="steps",
            save_steps=2,
        ).train(resume_from_checkpoint=resume)  # fmt: skip
        sync.close()
    assert keep.check(uri, 5)[0].steps[1] == 2  # a step that came while another was written may share its version
    assert bucket.materialise(uri) == bucket.cast_bytes(keep.steps[5])
