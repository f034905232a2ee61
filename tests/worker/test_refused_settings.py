"""vLLM's own settings objects, made from its own options: what deltas cannot be served with is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from family_case import SMALL, quick_start
from helpers.families import FAMILIES
from replica import replica

import vllm_delta_plugin
from delta_sync.errors import MappingError
from vllm_delta_plugin.compat import settings_seam
from vllm_delta_plugin.compat.seam import SeamError
from vllm_delta_plugin.ranks import RankError
from vllm_delta_plugin.refusals import OFF, check_config
from vllm_delta_plugin.worker_extension import DeltaSyncWorkerExtension

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("settings") / "model")


def settings(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plain = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    with quick_start():
        return EngineArgs(model=str(model), **plain, **options).create_engine_config()


@pytest.fixture(scope="module")
def plain(model: Path) -> Any:
    return settings(model)


def at(config: Any, path: str) -> tuple[Any, str]:
    """The object that holds a setting, and the setting's name in it."""
    *parents, name = path.split(".")
    for parent in parents:
        config = getattr(config, parent)
    return config, name


def remove(place: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM's class had no such field: it must have one, whose default stays behind on the class."""
    monkeypatch.delattr(place, name)
    monkeypatch.delattr(type(place), name, raising=False)


def speculating(method: str, **more: Any) -> dict[str, Any]:
    return {"speculative_config": {"method": method, "num_speculative_tokens": 1, **more}}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"quantization": "int8_per_channel_weight_only"}, "quantization.*got int8_per_channel_weight_only"),
        ({"quantization": "mxfp8"}, "quantization.*got mxfp8"),
        ({"cpu_offload_gb": 1}, "weight offload"),
        ({"offload_group_size": 2}, "weight offload"),
        (speculating("eagle3"), "speculative decoding.*got eagle3"),
        (speculating("draft_model"), "speculative decoding.*got draft_model"),
    ],
)
def test_what_changes_the_weights_is_refused(model: Path, options: dict[str, Any], what: str) -> None:
    if "speculative_config" in options:
        options = {"speculative_config": {**options["speculative_config"], "model": str(model)}}
    with pytest.raises(MappingError, match=what):
        check_config(settings(model, **options))


@pytest.mark.parametrize(
    ("path", "value", "what"),
    [
        ("model_config.enable_sleep_mode", True, "sleep mode.*serve without --enable-sleep-mode"),
        ("parallel_config.enable_eplb", True, "expert load balancing.*serve without --enable-eplb"),
        ("ec_transfer_config", object(), "encoders in engines of their own"),
        ("model_config.quantization", "awq", "quantization.*got awq.*--quantization fp8"),
        ("load_config.load_format", "bitsandbytes", "load format.*got bitsandbytes"),
        (
            "parallel_config.enable_fault_tolerance",
            True,
            "fault tolerance of engines.*serve without --enable-fault-tolerance",
        ),
    ],
)
def test_what_vllm_takes_elsewhere_is_refused(
    plain: Any, path: str, value: object, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a CPU, or of this model, vLLM itself takes none of it: it is set where it arrives, which must be there."""
    monkeypatch.setattr(*at(plain, path), value)
    with pytest.raises(MappingError, match=what):
        check_config(plain)


def test_draft_layers_of_the_models_own_are_refused(tmp_path: Path) -> None:
    config = FAMILIES["DeepSeek-V3"].config()
    config.num_nextn_predict_layers = 1
    config.architectures = ["DeepseekV3ForCausalLM"]
    config.save_pretrained(tmp_path)
    with pytest.raises(MappingError, match=r"speculative decoding.*got mtp"):
        check_config(settings(tmp_path, **speculating("mtp")))


def test_a_draft_by_a_method_without_a_name_is_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(model, **speculating("ngram"))
    monkeypatch.setattr(config.speculative_config, "method", None)
    with pytest.raises(MappingError, match="speculative decoding"):
        check_config(config)


@pytest.mark.parametrize(
    "path",
    [*OFF, "model_config.quantization", "load_config.load_format", "lora_config", "speculative_config", "model_config"],
)
def test_a_setting_that_vllm_renamed_fails_the_attach_by_name(
    plain: Any, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker: Any = DeltaSyncWorkerExtension()
    worker.vllm_config = plain
    place, name = at(plain, path)
    remove(place, name, monkeypatch)
    error = worker.delta_sync_attach({"uri": "memory://"})["error"]
    assert error["kind"] == "SeamError"
    assert f"vLLM seam {type(place).__module__}.{type(place).__name__}.{name}, expected there" in error["error"]


def test_a_renamed_method_of_drafts_is_named(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(model, **speculating("ngram"))
    remove(config.speculative_config, "method", monkeypatch)
    with pytest.raises(SeamError, match=r"SpeculativeConfig\.method"):
        check_config(config)


def test_a_setting_is_missed_only_in_releases_that_are_known_without_it(
    plain: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove(plain.parallel_config, "enable_fault_tolerance", monkeypatch)
    monkeypatch.setattr(settings_seam, "vllm_version", lambda: "0.26.0+cu129")
    check_config(plain)
    for version in ("0.27.0", "0.260.0", "unknown"):
        monkeypatch.setattr(settings_seam, "vllm_version", lambda version=version: version)
        with pytest.raises(SeamError, match="enable_fault_tolerance"):
            check_config(plain)


def test_an_engine_of_a_vllm_without_a_setting_does_not_start(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other way round, since vLLM itself needs what it has: a setting is looked for that it never had."""
    import vllm.v1.engine.core  # noqa: F401

    vllm_delta_plugin.register()  # which vLLM calls but once in a process, here before there were engines
    monkeypatch.setitem(OFF, "parallel_config.enable_other", ("another", "serve without"))
    follow = {"delta_sync": {"uri": tmp_path.as_uri()}}
    start = replica(model, **SMALL, additional_config=follow)
    with quick_start(), pytest.raises(RankError, match=r"vLLM seam .*ParallelConfig\.enable_other") as caught, start:
        pytest.fail("it started")
    assert caught.value.kind == "SeamError"


@pytest.mark.parametrize("options", [{"quantization": f"fp8{how}"} for how in ("", "_per_tensor", "_per_channel")])
def test_fp8_made_while_loading_is_served(model: Path, options: dict[str, Any]) -> None:
    check_config(settings(model, **options))


def test_a_checkpoint_in_blocks_of_fp8_is_served(model: Path, tmp_path: Path) -> None:
    quantised = tiny_models.rewrite(model, tmp_path / "fp8", tiny_models.tensors(model))
    described = json.loads((quantised / "config.json").read_text())
    (quantised / "config.json").write_text(json.dumps({**described, "quantization_config": BLOCK_FP8}))
    check_config(settings(quantised))


def test_adapters_over_fp8_are_refused(model: Path) -> None:
    with pytest.raises(MappingError, match=r"LoRA.*on weights quantised as fp8.*the unquantised checkpoint"):
        check_config(settings(model, quantization="fp8", enable_lora=True))


def test_plain_settings_and_proposals_without_weights_are_served(model: Path) -> None:
    check_config(settings(model))
    check_config(settings(model, **speculating("ngram")))
