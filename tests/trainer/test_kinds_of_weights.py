"""Real trainers of models whose weights are not all alike: what is published is what a checkpoint would hold."""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from kept import KeepSteps
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from delta_sync.errors import MappingError
from trl_callback import DeltaSyncCallback

FROZEN = "model.layers.0.mlp.up_proj.weight"


def resized() -> Any:
    model = tiny.llama()
    model.resize_token_embeddings(tiny.VOCAB + 5)
    return model


def frozen() -> Any:
    model = tiny.llama()
    model.get_parameter(FROZEN).requires_grad_(False)
    return model


def with_buffers() -> Any:
    model = tiny.llama()
    model.model.register_buffer("count", torch.zeros(3))
    model.model.register_buffer("scratch", torch.zeros(3), persistent=False)
    return model


class Count(TrainerCallback):
    """Moves a buffer in every step, as running statistics do."""

    def on_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        if hasattr(model.model, "count"):
            model.model.count += 1
            model.model.scratch += 1


KINDS: dict[str, Callable[[], Any]] = {
    "resized vocabulary": resized,
    "frozen layer": frozen,
    "buffers": with_buffers,
    "pure bfloat16": lambda: tiny.llama().to(torch.bfloat16),
    "untied": lambda: tiny.llama(tied=False),
    "vision and language": tiny.llava,
    "fused experts": tiny.mixtral,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_version_is_the_checkpoint_of_its_step(tmp_path, kind: str) -> None:
    uri, keep = f"memory://{uuid.uuid4().hex}", KeepSteps()
    sync = DeltaSyncCallback(uri, anchor_every=0, anchor_chain_ratio=0.0)
    callbacks = [Count(), sync, keep]
    grpo.plain_trainer(
        tmp_path, model=KINDS[kind](), callbacks=callbacks, steps=2, bf16=True, learning_rate=1e-2
    ).train()
    sync.close()
    seen = keep.check(uri, 2)
    names, touched = set(keep.steps[0]), {name for manifest in seen[1:] for name in manifest.tensors}
    if kind == "frozen layer":
        assert FROZEN in names - touched
    if kind == "buffers":
        assert "model.count" in touched and "model.scratch" not in names
    if kind == "resized vocabulary":
        assert seen[0].tensors["model.embed_tokens.weight"].shape == (tiny.VOCAB + 5, 32)
    assert touched, "nothing was trained"


def test_a_server_that_has_the_vocabulary_from_before_is_refused_by_name(tmp_path) -> None:
    uri = f"memory://{uuid.uuid4().hex}"
    with StandInReplica(uri, tiny.llama()).running() as replica:
        sync = DeltaSyncCallback(uri)
        trainer = grpo.grpo_trainer(tmp_path, model=resized(), url=replica.url, use_vllm=True, callbacks=[sync])
        with pytest.raises(MappingError, match=r"embed_tokens.*\[101, 32\] as in the trainer.*\[96, 32\] at http"):
            trainer.train()
    assert bucket.chain(uri) == []
