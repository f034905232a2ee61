"""Configurations in which live weights are not what a checkpoint's bits would be, refused by name at attach."""

from __future__ import annotations

from typing import Any

from delta_sync.errors import MappingError

_QUANTISED = {None, "fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block"}  # see compat/fp8_seam.py
_LOAD_FORMATS = {"auto", "hf", "safetensors", "fastsafetensors", "runai_streamer", "instanttensor", "dummy"}


def check_config(config: Any) -> None:
    """MappingError naming the setting of this VllmConfig that deltas cannot be served with, and what to do."""
    for what, got, remedy in _found(config):
        raise MappingError(what, expected="off", got=got, remedy=remedy)


def _found(config: Any) -> list[tuple[str, object, str]]:
    found: list[tuple[str, object, str]] = []

    def refuse(what: str, got: object, remedy: str) -> None:
        if got:
            found.append((what, got, remedy))

    model, load, parallel = config.model_config, config.load_config, config.parallel_config
    load_format = str(getattr(load.load_format, "value", load.load_format))
    if model.quantization not in _QUANTISED:
        refuse("quantization", model.quantization, "serve the unquantised checkpoint, or with --quantization fp8")
    elif model.quantization and getattr(config, "lora_config", None) is not None:
        refuse("LoRA", f"on weights quantised as {model.quantization}", "serve the unquantised checkpoint")
    refuse("speculative decoding", _draft(config), "serve without a draft model: its weights would stay the old ones")
    refuse("sleep mode", getattr(model, "enable_sleep_mode", False), "serve without --enable-sleep-mode")
    refuse("expert load balancing", getattr(parallel, "enable_eplb", False), "serve without --enable-eplb")
    # It would go on with an engine that had to end, since its ranks may hold two versions.
    tolerant = getattr(parallel, "enable_fault_tolerance", False)
    refuse("fault tolerance of engines", tolerant, "serve without --enable-fault-tolerance")
    # What they encode is named by its engine and generation of weights: nobody else would find it.
    apart = getattr(config, "ec_transfer_config", None)
    refuse("encoders in engines of their own", apart, "serve without --ec-transfer-config")
    refuse("weight offload", _offload(config), "serve without CPU offload")
    if load_format not in _LOAD_FORMATS:
        refuse("load format", load_format, f"use one of {', '.join(sorted(_LOAD_FORMATS))}")
    return found


def _draft(config: Any) -> object:
    """The method, if it proposes tokens by weights of its own rather than by what was said before."""
    method = getattr(getattr(config, "speculative_config", None), "method", None)
    return None if method in (None, "ngram", "ngram_gpu", "suffix") else method


def _offload(config: Any) -> object:
    """GiB or groups of weights kept off the device; the setting moved between vLLM releases."""
    places = (
        getattr(config, "cache_config", None),
        getattr(getattr(config, "offload_config", None), "uva", None),
        getattr(getattr(config, "offload_config", None), "prefetch", None),
    )
    names = ("cpu_offload_gb", "offload_group_size")
    return next((value for place in places for name in names if (value := getattr(place, name, 0))), 0)
