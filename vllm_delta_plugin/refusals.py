"""Configurations in which live weights are not what a checkpoint's bits would be, refused by name at attach."""

from __future__ import annotations

from typing import Any

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.settings_seam import setting

_QUANTISED = {None, "fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}  # see compat/fp8_seam.py
_LOAD_FORMATS = {"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor", "dummy"}
_PROPOSED_WITHOUT_WEIGHTS = {"ngram", "ngram_gpu", "suffix"}  # by what was said before
OFF = {  # setting that must be off -> what it is, and what to do
    "model_config.enable_sleep_mode": ("sleep mode", "serve without --enable-sleep-mode"),
    "parallel_config.enable_eplb": ("expert load balancing", "serve without --enable-eplb"),
    # It would go on with an engine that had to end, since its ranks may hold two versions.
    "parallel_config.enable_fault_tolerance": (
        "fault tolerance of engines",
        "serve without --enable-fault-tolerance",
    ),
    # What they encode is named by its engine and generation of weights: nobody else would find it.
    "ec_transfer_config": ("encoders in engines of their own", "serve without --ec-transfer-config"),
    "offload_config.uva.cpu_offload_gb": ("weight offload", "serve without CPU offload"),
    "offload_config.prefetch.offload_group_size": ("weight offload", "serve without CPU offload"),
}


def check_config(config: Any) -> None:
    """MappingError naming the setting of this VllmConfig that deltas cannot be served with, and what to do.

    SeamError if this vLLM has not all settings that are looked at.
    """
    for what, got, remedy in _found(config):
        raise MappingError(what, expected="off", got=got, remedy=remedy)


def _found(config: Any) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = []

    def refuse(what: str, got: object, remedy: str) -> None:
        if got:
            found.append((what, got, remedy))

    quantization, lora = setting(config, "model_config.quantization"), setting(config, "lora_config")
    load_format = setting(config, "load_config.load_format")
    load_format = str(getattr(load_format, "value", load_format))
    if quantization not in _QUANTISED:
        refuse("quantization", quantization, "serve the unquantised checkpoint, or with --quantization fp8")
    elif quantization and lora is not None:
        refuse("LoRA", f"on weights quantised as {quantization}", "serve the unquantised checkpoint")
    refuse("speculative decoding", _draft(config), "serve without a draft model: its weights would stay the old ones")
    for path, (what, remedy) in OFF.items():
        refuse(what, setting(config, path), remedy)
    if load_format not in _LOAD_FORMATS:
        refuse("load format", load_format, f"use one of {', '.join(sorted(_LOAD_FORMATS))}")
    return found


def _draft(config: Any) -> str | None:
    """The method, unless it proposes tokens without weights of its own."""
    speculative = setting(config, "speculative_config")
    if speculative is None:
        return None
    method = setting(speculative, "method")
    return None if method in _PROPOSED_WITHOUT_WEIGHTS else str(method)
