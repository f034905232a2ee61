"""LoRA training published as merged weights: PEFT's own merge to the bit, and the model left as it is."""

from __future__ import annotations

import copy
import time
import uuid
from collections.abc import Callable
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from stand_in_replica import StandInReplica
from transformers import TrainerCallback

from delta_sync.errors import MappingError
from trl_callback import DeltaSyncCallback
from trl_callback.serving_image import ServingImage
from trl_callback.shard_image import ShardImage

peft = pytest.importorskip("peft", reason="PEFT is not installed (extra peft)")
TARGETS = ["q_proj", "down_proj"]


def adapted(base: torch.nn.Module, seed: int = 1, **settings: Any) -> Any:
    """A PEFT model whose adapters are not zero, as after some training."""
    model = peft.get_peft_model(base, peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, **settings}))
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def image(model: torch.nn.Module) -> dict[str, bytes]:
    return {tensor.name: tensor.bits.tobytes() for tensor in ServingImage(model, lambda name: "BF16")}


def merged(model: Any) -> dict[str, bytes]:
    """What PEFT itself makes of a copy."""
    return bucket.cast_bytes(tiny.cast_state(copy.deepcopy(model).merge_and_unload()))


CASES: dict[str, Any] = {
    "lora": lambda: adapted(tiny.llama()),
    "bfloat16": lambda: adapted(tiny.llama().to(torch.bfloat16)),
    "dora": lambda: adapted(tiny.llama(), use_dora=True),
    "rslora": lambda: adapted(tiny.llama(), use_rslora=True, lora_alpha=3),
    "embeddings": lambda: adapted(tiny.llama(tied=False), target_modules=["embed_tokens", "lm_head"]),
    "a layer trained whole": lambda: adapted(tiny.llama(tied=False), modules_to_save=["lm_head"]),
    "beside experts": lambda: adapted(tiny.qwen3_moe(), target_modules=["q_proj", "v_proj"]),
    "vision and language": lambda: adapted(tiny.llava(), target_modules=["q_proj"]),
}


@pytest.mark.parametrize("case", CASES)
def test_the_image_is_what_peft_merges_and_the_model_stays(case: str) -> None:
    model = CASES[case]()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = image(model)
    assert found == merged(model)
    assert found == image(model), "a second look finds the same bits"
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert found != bucket.cast_bytes(tiny.cast_state(model.unload())), "there was something to merge"


def test_an_adapter_added_by_transformers_is_merged_too() -> None:
    model = tiny.llama()
    base = image(model)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=TARGETS))
    assert image(model) == base, "a new adapter adds nothing"
    with torch.no_grad():
        model.model.layers[0].self_attn.q_proj.lora_B["default"].weight.fill_(0.1)
    found = image(model)
    assert [name for name in base if found[name] != base[name]] == ["model.layers.0.self_attn.q_proj.weight"]


@pytest.mark.parametrize("walk", [
    lambda model: ServingImage(model, lambda name: "BF16"),
    lambda model: ShardImage(model, lambda name: "BF16", 0, 1),
])  # fmt: skip
def test_adapters_may_come_and_go_between_two_looks(walk: Callable[[Any], Any]) -> None:
    base = tiny.llama()
    plain = bucket.cast_bytes(tiny.cast_state(base))
    kept = walk(base)
    pieces = kept.pieces if isinstance(kept, ShardImage) else kept.sources

    def look() -> dict[str, bytes]:
        parts = [getattr(part, "source", part) for part in pieces()]
        return {part.name: part.cast().bits.tobytes() for part in parts}

    assert look() == plain
    model = adapted(base)
    assert look() == merged(model) != plain
    model.unload()
    assert look() == plain


def test_several_active_adapters_add_up() -> None:
    model = adapted(tiny.llama())
    model.add_adapter("second", peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False))
    only_first = image(model)
    model.base_model.set_adapter(["default", "second"])
    assert image(model) == merged(model) != only_first


def test_ranks_that_hold_whole_weights_deal_the_merging_out() -> None:
    model = adapted(tiny.llama())
    pieces = [p for rank in range(2) for p in ShardImage(model, lambda name: "BF16", rank, 2).pieces()]
    assert {p.name: p.source.cast().bits.tobytes() for p in pieces} == merged(model)
    assert len(pieces) == len({p.name for p in pieces})


def refused(model: torch.nn.Module) -> str:
    with pytest.raises(MappingError) as caught:
        image(model)
    assert caught.value.remedy
    return str(caught.value)


def test_what_cannot_be_merged_is_refused_by_name() -> None:
    assert "lora_bias" in refused(adapted(tiny.llama(), lora_bias=True, target_modules=["q_proj"]))
    prompts = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4)
    assert "PROMPT_TUNING" in refused(peft.get_peft_model(tiny.llama(), prompts))
    ia3 = peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    assert "ia3" in refused(peft.get_peft_model(tiny.llama(), ia3))
    experts = peft.LoraConfig(r=2, target_parameters=["mlp.experts.gate_up_proj"])
    assert "ParamWrapper" in refused(peft.get_peft_model(tiny.qwen3_moe(), experts))
    tied = adapted(tiny.llama(), target_modules=["embed_tokens"])
    assert "tied: " in refused(tied) and "embed_tokens" in refused(tied)
    assert "lm_head" in refused(adapted(tiny.llama(), modules_to_save=["lm_head"]))
    model = adapted(tiny.llama())
    model.merge_adapter()
    assert "unmerge_adapter" in refused(model)
    model.unmerge_adapter()
    image(model)


def test_shards_of_an_adapted_model_are_refused() -> None:
    model = adapted(tiny.llama())
    model.get_base_model().model.norm.weight.ds_tensor = torch.ones(3)
    with pytest.raises(MappingError, match="with adapters"):
        ShardImage(model, lambda name: "BF16", 0, 2)


def test_an_adapter_that_is_added_to_shards_is_refused() -> None:
    base = tiny.llama()
    base.model.norm.weight.ds_tensor = torch.ones(3)
    kept = ShardImage(base, lambda name: "BF16", 0, 2)
    adapted(base)
    with pytest.raises(MappingError, match="with adapters"):
        list(kept.pieces())


class EveryVersion(TrainerCallback):
    """The merged weights after each step, by PEFT."""

    def __init__(self) -> None:
        self.merged: dict[int, dict[str, bytes]] = {}

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.merged[state.global_step] = merged(model)


def wait_until(found: Callable[[], bool]) -> None:
    end = time.monotonic() + 30
    while not found():
        assert time.monotonic() < end, "not within 30 s"
        time.sleep(0.05)


def test_grpo_with_an_adapter_rolls_out_from_merged_weights(tmp_path) -> None:
    uri, seen = f"memory://{uuid.uuid4().hex}", EveryVersion()
    base = tiny.llama()
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    replica = StandInReplica(uri, copy.deepcopy(base))
    with replica.running():
        sync = DeltaSyncCallback(uri, sync_timeout=120)
        lora = peft.LoraConfig(r=4, target_modules=TARGETS, task_type="CAUSAL_LM")
        trainer = grpo.grpo_trainer(tmp_path, model=base, url=replica.url, use_vllm=True, callbacks=[sync, seen],
                                    learning_rate=0.1, peft_config=lora)  # fmt: skip
        trainer.train()
        sync.close()
        newest = bucket.newest(uri)
        wait_until(lambda: replica.served[-1] == newest.version)
    origin, *deltas = bucket.chain(uri)
    assert origin.kind == "origin" and all(manifest.changed_elements > 0 for manifest in deltas)
    assert {n: b.tobytes() for n, b in replica.live.items()} == seen.merged[4]
    assert replica.anchors_taken == 0, "an adapter that adds nothing yet is the weights the server loaded"
    unwrapped = trainer.model.get_base_model().state_dict()
    kept = {name.replace(".base_layer", ""): tensor for name, tensor in unwrapped.items() if "lora_" not in name}
    assert all(torch.equal(frozen[name], tensor) for name, tensor in kept.items()), "the base was never touched"
