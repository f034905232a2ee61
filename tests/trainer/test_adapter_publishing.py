"""LoRA training published as adapters: the trainer's bits in PEFT's form, over a base that is never touched."""

from __future__ import annotations

import copy
import json
import logging
import threading
import time
import uuid
from pathlib import Path
from typing import Any

import bucket
import grpo
import pytest
import tiny
import torch
from several_ranks import run_ranks
from stand_in_replica import StandInReplica
from transformers import Trainer, TrainerCallback, TrainingArguments
from typer.testing import CliRunner

from delta_sync.adapter import read_adapter
from delta_sync.cli.app import app
from delta_sync.errors import DeltaSyncError, MappingError
from delta_sync.ledger import Ledger
from delta_sync.manifest import Manifest
from delta_sync.store.memory import MemoryStore
from delta_sync.store.open import open_store
from trl_callback import DeltaSyncCallback
from trl_callback.adapter_image import AdapterImage, adapter_sizes
from trl_callback.adapter_session import AdapterSession
from trl_callback.config import DeltaSyncConfig
from trl_callback.metrics import Metrics
from trl_callback.session import Subject

peft = pytest.importorskip("peft", reason="PEFT is not installed (extra peft)")
TARGETS = ["q_proj", "down_proj"]
SERVED = {"max_rank": 16, "dtype": "BF16", "modules": ["q_proj", "k_proj", "v_proj", "o_proj", "down_proj"]}
run_command = CliRunner().invoke


def lora(**settings: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": TARGETS, "task_type": "CAUSAL_LM", **settings})


def saved(model: Any) -> dict[str, bytes]:
    """PEFT's own state dict of the adapter, cast to what is served."""
    state = peft.get_peft_model_state_dict(model, save_embedding_layers=False)
    return {n: t.detach().to(torch.bfloat16).view(torch.int16).numpy().tobytes() for n, t in state.items()}


def published(uri: str, manifest: Manifest) -> dict[str, bytes]:
    """A version's adapter as a reader proves it."""
    adapter = read_adapter(Ledger(open_store(uri)), manifest)
    return {name: tensor[3].tobytes() for name, tensor in adapter.tensors.items()}


class EveryStep(TrainerCallback):
    """The adapter after each step, by PEFT."""

    def __init__(self) -> None:
        self.adapters: dict[int, dict[str, bytes]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.adapters[state.global_step] = saved(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.adapters[state.global_step] = saved(model)


def train(folder: Path, uri: str, model: Any, steps: int = 3, **settings: Any) -> EveryStep:
    """A plain Trainer's few steps; what the adapter was after each."""
    seen = EveryStep()
    sync = DeltaSyncCallback(uri, **{"lora": "adapter", "serving_dtype": "BF16", **settings})
    rows = [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 16
    arguments = TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=2, learning_rate=0.01, report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False,
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[sync, seen]).train()
    sync.close()
    return seen


def new_uri() -> str:
    return f"memory://{uuid.uuid4().hex}"


CASES: dict[str, Any] = {
    "lora": (tiny.llama, {}),
    "bfloat16 base": (lambda: tiny.llama().to(torch.bfloat16), {}),
    "rslora": (tiny.llama, {"use_rslora": True, "lora_alpha": 3}),
    "some layers": (tiny.llama, {"layers_to_transform": [1]}),
    "a head": (lambda: tiny.llama(tied=False), {"target_modules": ["embed_tokens", "v_proj"]}),
}


@pytest.mark.parametrize("case", CASES)
def test_every_version_is_the_adapter_that_peft_would_save(case: str, tmp_path: Path) -> None:
    make, settings = CASES[case]
    uri, base = str(tmp_path / "run"), make()
    frozen = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    model = peft.get_peft_model(base, lora(**settings))
    seen = train(tmp_path, uri, model)
    origin, *versions = bucket.chain(uri)
    assert (origin.kind, {manifest.kind for manifest in versions}) == ("origin", {"adapter"})
    assert {manifest.state_digest for manifest in versions} == {origin.state_digest}, "the base is the base"
    for manifest in versions:
        assert published(uri, manifest) == seen.adapters[manifest.steps[1]]
    assert {0, 3} <= {manifest.steps[1] for manifest in versions}, "those in between may be taken together"
    kept = {
        name.replace(".base_layer", ""): tensor for name, tensor in base.state_dict().items() if "lora_" not in name
    }
    assert all(torch.equal(frozen[name], tensor) for name, tensor in kept.items())

    folder = tmp_path / "adapter"
    result = run_command(app, ["materialize", uri, str(folder), "--json"])
    assert result.exit_code == 0, result.output
    loaded = peft.PeftModel.from_pretrained(make(), folder)
    assert saved(loaded) == seen.adapters[3], "PEFT loads what it would have saved"
    layer = next(module for module in loaded.modules() if hasattr(module, "lora_A"))
    trained = next(module for module in model.modules() if hasattr(module, "lora_A"))
    assert layer.scaling == trained.scaling
    assert adapted(loaded) == adapted(model), "and on the same modules"


def adapted(model: Any) -> set[str]:
    return {name for name, module in model.named_modules() if hasattr(module, "lora_A")}


def test_the_base_is_anchored_once_and_the_run_verifies(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    train(tmp_path, uri, peft.get_peft_model(tiny.llama(), lora()), steps=6, anchor_every=2, anchor_chain_ratio=0.001)
    assert len(Ledger(open_store(uri)).anchors()) == 1
    base = bucket.materialise(uri)
    assert base == bucket.cast_bytes(tiny.cast_state(tiny.llama()))
    result = run_command(app, ["verify", uri, "--json"])
    found = json.loads(result.output)
    assert (result.exit_code, found["damage"]) == (0, [])
    assert found["proven"][-1] == bucket.newest(uri).version
    shown = run_command(app, ["inspect", uri])
    assert "LoRA adapter of rank 4" in shown.output, shown.output
    listed = json.loads(run_command(app, ["ledger", uri, "--json"]).output)
    assert {row["kind"] for row in listed["versions"]} == {"origin", "adapter"}
    object_ = bucket.newest(uri).objects[0]
    path = Path(uri) / object_.key
    path.write_bytes(path.read_bytes()[:-1] + b"\x07")
    damaged = json.loads(run_command(app, ["verify", uri, "--json"]).output)
    assert [row["object"] for row in damaged["damage"]] == [object_.key]


def test_uploading_the_base_may_take_as_long_as_its_size_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    uploading, go_on = threading.Event(), threading.Event()
    put_file = MemoryStore.put_file

    def slow(self: MemoryStore, *args: Any) -> None:
        uploading.set()
        assert go_on.wait(60)
        put_file(self, *args)

    monkeypatch.setattr(MemoryStore, "put_file", slow)
    model = peft.get_peft_model(tiny.llama().to(torch.bfloat16), lora())
    base = sum(parameter.nbytes for name, parameter in model.named_parameters() if "lora_" not in name)
    monkeypatch.setattr("trl_callback.publisher._SLOWEST", base / 60)  # a minute for the base, seconds for the adapter
    config = DeltaSyncConfig.build(new_uri(), lora="adapter", publish_timeout=0.1)
    session = AdapterSession(Subject(model, None, "BF16", 0), config, None, Metrics())
    try:
        assert uploading.wait(20)
        given = session._publisher._job_ends
        assert given is not None and given - time.monotonic() > 30
        session.step_done(1)
    finally:
        go_on.set()
        session.close()


def test_old_adapters_go_where_anchors_are_to_be_kept(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    model = peft.get_peft_model(tiny.llama(), lora())
    train(tmp_path, uri, model, steps=8, anchor_every=3, keep_anchors=1, keep_grace=0.001)
    left = bucket.chain_left(uri)
    assert left[0].version > 1 and left[-1].steps[1] == 8
    kept = {ref.key for manifest in left for ref in manifest.objects}
    assert {info.key for info in open_store(uri).list("adapters/")} == kept


def test_grpo_rolls_out_once_the_adapter_is_served(tmp_path: Path) -> None:
    uri, seen, base = new_uri(), EveryStep(), tiny.llama()
    replica = StandInReplica(uri, copy.deepcopy(base))
    replica.lora = SERVED
    with replica.running():
        sync = DeltaSyncCallback(uri, sync_timeout=120, lora="adapter")
        trainer = grpo.grpo_trainer(tmp_path, model=base, url=replica.url, use_vllm=True, callbacks=[sync, seen],
                                    learning_rate=0.1, peft_config=lora())  # fmt: skip
        trainer.train()
        sync.close()
    versions = [manifest for manifest in bucket.chain(uri) if manifest.kind == "adapter"]
    assert [published(uri, manifest) for manifest in versions] == [seen.adapters[m.steps[1]] for m in versions]
    assert replica.anchors_taken == 0, "the server loaded the base itself"
    assert not Ledger(open_store(uri)).anchors()


@pytest.mark.parametrize(
    ("served", "settings", "said"),
    [
        (None, {}, "--enable-lora --max-lora-rank 8"),
        ({**SERVED, "max_rank": 2}, {}, "at most 2"),
        ({**SERVED, "modules": ["q_proj"]}, {}, "'down_proj'"),
    ],
)
def test_a_server_that_cannot_have_it_is_named_at_the_start(
    tmp_path: Path, served: Any, settings: Any, said: str
) -> None:
    uri, base = new_uri(), tiny.llama()
    replica = StandInReplica(uri, copy.deepcopy(base))
    replica.lora = served
    with replica.running(), pytest.raises(MappingError, match=said):
        sync = DeltaSyncCallback(uri, sync_timeout=120, lora="adapter", server_url=replica.url)
        train(tmp_path, uri, peft.get_peft_model(base, lora()), server_url=replica.url)
        sync.close()
    assert bucket.chain(uri) == [], "nothing was published"


REFUSED: dict[str, Any] = {
    "no adapter": (lambda: tiny.llama(), "got none"),
    "DoRA": (lambda: peft.get_peft_model(tiny.llama(), lora(use_dora=True)), "plain LoRA"),
    "modules_to_save": (
        lambda: peft.get_peft_model(tiny.llama(tied=False), lora(modules_to_save=["lm_head"])),
        "whole",
    ),
    "ranks": (lambda: peft.get_peft_model(tiny.llama(), lora(rank_pattern={"q_proj": 2})), "one rank and alpha"),
    "alphas": (lambda: peft.get_peft_model(tiny.llama(), lora(alpha_pattern={"q_proj": 2})), "one rank and alpha"),
    "lora_bias": (lambda: peft.get_peft_model(tiny.llama(), lora(lora_bias=True)), "lora_bias"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_plain_adapter_is_refused_by_name(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(MappingError, match=said) as caught:
        AdapterImage(make(), "BF16")
    assert caught.value.remedy


def test_a_base_that_is_trained_or_merged_into_is_refused() -> None:
    model = peft.get_peft_model(tiny.llama(), lora())
    model.get_base_model().model.norm.weight.requires_grad_(True)
    with pytest.raises(MappingError, match=r"model\.norm\.weight"):
        AdapterImage(model, "BF16")
    model = peft.get_peft_model(tiny.llama(), lora())
    image = AdapterImage(model, "BF16")
    model.merge_adapter()
    with pytest.raises(MappingError, match="unmerge_adapter"):
        list(image)


def set_scaling(model: Any, modules: slice) -> None:
    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for layer in layers[modules]:
        layer.scaling["default"] *= 2


def set_alpha(model: Any) -> None:
    set_scaling(model, slice(None))
    for module in model.modules():
        if hasattr(module, "lora_A"):
            module.lora_alpha["default"] *= 2


CHANGES: dict[str, Any] = {
    "base": (lambda model: model.get_base_model().model.norm.requires_grad_(True), r"model\.norm\.weight"),
    "scaling": (lambda model: set_scaling(model, slice(None)), "scaling 2, of its rank and alpha"),
    "one scaling": (lambda model: set_scaling(model, slice(2, 3)), r"layers\.1\.self_attn\.q_proj.*scaling 4"),
    "alpha": (set_alpha, "as at the start"),
    "unloaded": (lambda model: model.unload(), "got none"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_what_changes_while_training_is_refused_by_name(case: str) -> None:
    """The server has the base and the scaling of the start; it would serve something else."""
    change, said = CHANGES[case]
    model = peft.get_peft_model(tiny.llama(), lora())
    image = AdapterImage(model, "BF16")
    list(image)
    change(model)
    with pytest.raises(MappingError, match=said) as caught:
        list(image)
    assert caught.value.remedy


def test_what_only_peft_reads_may_change_while_training() -> None:
    model = peft.get_peft_model(tiny.llama(), lora())
    image = AdapterImage(model, "BF16")
    model.peft_config["default"].base_model_name_or_path = "its name on the Hub"
    model.peft_config["default"].task_type = "FEATURE_EXTRACTION"
    assert list(image)


def test_an_adapter_added_by_transformers_has_pefts_names() -> None:
    model = tiny.llama()
    model.add_adapter(lora())
    image = AdapterImage(model, "BF16")
    assert {tensor.name for tensor in image} == saved(peft.get_peft_model(tiny.llama(), lora())).keys()
    assert (image.config.r, image.config.target_modules) == (4, ("down_proj", "q_proj"))


def test_a_quantised_base_is_refused_by_name() -> None:
    model = peft.get_peft_model(tiny.llama(), lora())
    weight = model.get_base_model().model.layers[0].mlp.up_proj.weight
    weight.quant_state = object()  # what bitsandbytes leaves on a 4-bit weight
    with pytest.raises(MappingError, match="up_proj"):
        AdapterImage(model, "BF16")


def test_the_setting_is_checked() -> None:
    with pytest.raises(DeltaSyncError, match="'merged' or 'adapter'"):
        DeltaSyncCallback("memory://x", lora="both")


def test_a_resumed_run_goes_on_over_the_same_base(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    model = peft.get_peft_model(tiny.llama(), lora())
    train(tmp_path, uri, model)
    seen = train(tmp_path, uri, model)
    versions = bucket.chain(uri)
    assert [m.epoch for m in versions if m.kind == "origin"] == [1], "nobody sees the base without an adapter again"
    assert {m.epoch for m in versions} == {1, 2}
    newest = bucket.newest(uri)
    assert published(uri, newest) == seen.adapters[3]
    plan = Ledger(open_store(uri)).plan(None, None)
    assert plan is not None and plan.target.version == newest.version
    assert (plan.start, plan.deltas) == ("anchor", ()), "one anchor of the base leads to both trainers' adapters"


def test_a_change_from_adapters_to_merged_weights_and_back_is_said(tmp_path: Path, caplog: Any) -> None:
    uri = str(tmp_path / "run")
    model = peft.get_peft_model(tiny.llama(), lora())
    train(tmp_path, uri, model)
    with caplog.at_level(logging.WARNING):
        train(tmp_path, uri, model, lora="merged")
    assert "of kind 'adapter', this trainer's are of kind 'delta'" in caplog.text
    assert bucket.newest(uri).kind == "delta" and len(Ledger(open_store(uri)).anchors()) == 2
    merged = bucket.cast_bytes(tiny.cast_state(copy.deepcopy(model).merge_and_unload()))
    assert bucket.materialise(uri) == merged
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        seen = train(tmp_path, uri, model)
    assert "of kind 'delta', this trainer's are of kind 'adapter'" in caplog.text
    assert published(uri, bucket.newest(uri)) == seen.adapters[3]
    assert bucket.materialise(uri) == bucket.cast_bytes(tiny.cast_state(tiny.llama())), "anchored anew"


def test_what_a_version_costs_either_way_is_said_at_the_start(tmp_path: Path, caplog: Any) -> None:
    sizes = {}
    for kind in ("adapter", "merged"):
        uri = str(tmp_path / kind)
        model = peft.get_peft_model(tiny.llama(), lora())
        with caplog.at_level(logging.WARNING):
            train(tmp_path, uri, model, lora=kind)
        sizes[kind] = sum(ref.size for ref in bucket.newest(uri).objects)
    adapter, weights = adapter_sizes(model)
    assert f"an adapter is {2 * adapter / 1e6:.3g} MB a version" in caplog.text
    assert 2 * adapter < sizes["adapter"] < 2 * adapter + 4096, "tensors and a header"
    assert 0 < sizes["merged"] < 2 * weights


def test_ranks_that_hold_the_adapter_whole_publish_it_once(tmp_path: Path) -> None:
    uri = str(tmp_path / "run")
    said = run_ranks(2, "adapter_ranks_child.py", {"folder": str(tmp_path), "uri": uri, "fails_at": "nowhere"})
    assert said == ["rank 0 trained 3", "rank 1 trained 3"]
    newest, final = bucket.newest(uri), torch.load(tmp_path / "final.pt")
    expected = {name: tensor.view(torch.int16).numpy().tobytes() for name, tensor in final.items()}
    assert (newest.epoch, newest.steps[1], published(uri, newest)) == (1, 3, expected)


def test_what_stops_rank_zero_stops_all(tmp_path: Path) -> None:
    said = {"folder": str(tmp_path), "uri": str(tmp_path / "run"), "fails_at": "step"}
    first, second = run_ranks(2, "adapter_ranks_child.py", said)
    assert first.startswith("rank 0 raised StoreError: injected")
    assert "a failure on rank 0: StoreError: injected" in second
