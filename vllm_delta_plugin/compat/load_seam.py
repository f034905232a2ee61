"""Seam: vLLM's weight post-processing, before and after which every loaded model is looked at."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from delta_sync.errors import DeltaSyncError, MappingError
from vllm_delta_plugin.after_loading import Fingerprint, verify_direct
from vllm_delta_plugin.compat import fp8_seam
from vllm_delta_plugin.compat.process_seam import Unprocessed, unprocessed
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.coverage import WeightMap, add_tied_names, map_weights

_NAME = "process_weights_after_loading"
_MAPS: WeakKeyDictionary[Any, WeightMap | DeltaSyncError] = WeakKeyDictionary()


def weight_map(model: Any) -> WeightMap:
    """The map made while ``model`` was loaded; MappingError if it was not, or could not be, made."""
    found = _MAPS.get(model)
    if isinstance(found, DeltaSyncError):
        raise found
    if found is None:
        raise MappingError(
            f"model {type(model).__name__}",
            expected="loaded by vLLM's default loader after the worker extension was imported",
            got="a model whose loading was not seen",
            remedy="use --load-format auto, and do not wrap or reload the model",
        )
    return found


def install() -> None:
    """Wrap post-processing where the base loader calls it; SeamError if this vLLM has no such place."""
    from vllm.model_executor.model_loader import base_loader

    require(base_loader, _NAME, "BaseModelLoader")
    original = getattr(base_loader, _NAME)
    if getattr(original, "__delta_sync_wraps__", False):
        return

    @functools.wraps(original)
    def observed(model: Any, model_config: Any, target_device: Any) -> None:
        before = _before(model, model_config)
        original(model, model_config, target_device)
        if before is not None:
            _after(model, before, model_config.dtype)

    observed.__delta_sync_wraps__ = True  # type: ignore[attr-defined]
    setattr(base_loader, _NAME, observed)


@dataclass(frozen=True)
class _Before:
    """A model before post-processing, and its modules by name: those that are quantised, or else all, unprocessed."""

    fingerprint: Fingerprint
    quantised: dict[str, torch.nn.Module]
    plain: dict[str, Unprocessed]


def _before(model: Any, model_config: Any) -> _Before | None:
    """Trace and fingerprint; a failure is kept for ``weight_map`` to raise, since loading itself must go on."""
    from vllm_delta_plugin.checkpoint_index import checkpoint_tensors
    from vllm_delta_plugin.quantised_load import add_shadows
    from vllm_delta_plugin.trace import trace_load

    try:
        shapes = checkpoint_tensors(model_config.model, model_config.revision, _cache())
        quantised = fp8_seam.quantised(model) if model_config.quantization else {}
        with fp8_seam.as_loaded(quantised):
            weights = map_weights(model, trace_load(model, shapes, model_config.dtype), shapes)
        if quantised:
            add_shadows(weights, quantised)
        fingerprint = Fingerprint.take(model, weights)
        plain = {} if quantised else unprocessed(model)
        if not quantised:
            weights.let_go()
    except DeltaSyncError as error:
        _MAPS[model] = error
        return None
    _MAPS[model] = weights
    return _Before(fingerprint, quantised, plain)


def _after(model: Any, before: _Before, dtype: torch.dtype) -> None:
    from vllm_delta_plugin.quantised_load import finish

    weights = _MAPS[model]
    assert isinstance(weights, WeightMap)
    try:
        if before.quantised:
            finish(weights, model, before.quantised, dtype)
        verify_direct(model, weights, before.fingerprint, before.plain)
        add_tied_names(model, weights)
    except DeltaSyncError as error:
        _MAPS[model] = error


def _cache() -> str | None:
    from vllm.config import get_current_vllm_config

    return get_current_vllm_config().load_config.download_dir
