"""vLLM's own settings objects, made from its own options: what deltas cannot be served with is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny_models
from family_case import quick_start

from delta_sync.errors import MappingError
from vllm_delta_plugin.refusals import check_config

BLOCK_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic", "fmt": "e4m3"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_models.make("qwen3", tmp_path_factory.mktemp("settings") / "model")


def settings(model: Path, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    plain = {"dtype": "bfloat16", "max_model_len": 128, "enforce_eager": True, "skip_tokenizer_init": True}
    with quick_start():
        return EngineArgs(model=str(model), **plain, **options).create_engine_config()


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


def test_an_engine_that_would_outlive_a_failed_commit_is_refused(model: Path) -> None:
    """vLLM's releases differ in which engines may have the flag, so it is set where it arrives."""
    config = settings(model)
    config.parallel_config.enable_fault_tolerance = True
    with pytest.raises(MappingError, match=r"fault tolerance of engines.*serve without --enable-fault-tolerance"):
        check_config(config)


def test_encoders_in_engines_of_their_own_are_refused(model: Path) -> None:
    config = settings(model)
    config.ec_transfer_config = object()
    with pytest.raises(MappingError, match="encoders in engines of their own"):
        check_config(config)


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
