"""Seam: EngineCore, where the coordinator lives and where functions run between two steps."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from delta_sync.errors import MappingError
from vllm_delta_plugin.cache_salt import ATTRIBUTE
from vllm_delta_plugin.compat import batches, encoder_cache, executors, lockstep
from vllm_delta_plugin.compat.lora_seam import adapter_request
from vllm_delta_plugin.compat.pause import EnginePause
from vllm_delta_plugin.compat.seam import require, wrap
from vllm_delta_plugin.compat.settings_seam import setting
from vllm_delta_plugin.config import find_config
from vllm_delta_plugin.flag import WORKER_EXTENSION
from vllm_delta_plugin.weights_label import SESSION

_TICK = "delta_sync_tick"  # a request type that only this plugin puts into the input queue


def install() -> None:
    """Wrap EngineCore's methods once; SeamError if one is gone."""
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    require(EngineCore, "collective_rpc", "_initialize_kv_caches")
    require(EngineCoreProc, "_process_input_queue")
    # EngineCore.__init__ itself loads the plugins, so it cannot be wrapped: this runs inside it, after the model is up.
    wrap(EngineCore, "_initialize_kv_caches", _attach)
    wrap(EngineCore, "preprocess_add_request", _salt)
    batches.install()
    encoder_cache.install()
    wrap(EngineCore, "step", _ready_before)
    wrap(EngineCore, "step_with_batch_queue", _ready_before)
    wrap(EngineCore, "shutdown", _stop_before)
    wrap(EngineCoreProc, "_handle_client_request", _on_tick)
    for method in _UTILITIES:
        setattr(EngineCore, method.__name__, method)


def delta_sync_status(self: Any) -> dict[str, Any] | None:
    """Utility: the status, or None if this engine follows no run."""
    return self.delta_sync.status() if _of(self) else None


def delta_sync_metrics(self: Any) -> dict[str, Any] | None:
    """Utility: the status and what was measured, or None if this engine follows no run."""
    return self.delta_sync.metrics() if _of(self) else None


def delta_sync_tensors(self: Any, scan: bool = False) -> Any:
    """Utility: every tensor's digest; a future if a fresh scan is asked for."""
    return self.delta_sync.tensors(scan) if _of(self) else None


def delta_sync_read_tensor(self: Any, name: str) -> dict[str, Any] | None:
    """Utility: one tensor's live bytes."""
    return self.delta_sync.read_tensor(name) if _of(self) else None


def delta_sync_wait(self: Any, version: int | None, timeout: float) -> Any:
    """Utility: a future status, done when the version is served or time is over."""
    return self.delta_sync.wait_for(version, timeout) if _of(self) else None


def delta_sync_control(self: Any, action: str, version: int | None, timeout: float, dry_run: bool, order: str) -> Any:
    """Utility: a future answer to an operator's command; ``order``: its id, the same on all engines."""
    return self.delta_sync.control(action, version, timeout, dry_run, order) if _of(self) else None


def delta_sync_enter(self: Any, timeout: float) -> Any:
    """Utility: a future, whether a new request may come in."""
    return self.delta_sync.enter(timeout) if _of(self) else None


def delta_sync_hint(self: Any) -> Any:
    """Utility: look at the store at once."""
    return self.delta_sync.hint() if _of(self) else None


def delta_sync_pump(self: Any) -> None:
    """In-process engines have no loop: run what the coordinator's thread asked for."""
    if _of(self):
        self.delta_sync.main.pump()


_UTILITIES = (
    delta_sync_status,
    delta_sync_metrics,
    delta_sync_tensors,
    delta_sync_read_tensor,
    delta_sync_wait,
    delta_sync_control,
    delta_sync_enter,
    delta_sync_hint,
    delta_sync_pump,
)


def _of(core: Any) -> Any:
    return getattr(core, "delta_sync", None)


def _attach(original: Callable[..., Any]) -> Callable[..., Any]:
    def initialize_kv_caches(self: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(self, vllm_config, *args, **kwargs)
        config = find_config(vllm_config.additional_config)
        if config is not None and _of(self) is None:
            _refuse_unsupported(self, vllm_config, config)
            _trace_as_vllm_does(vllm_config)
            self.delta_sync = _build(self, vllm_config, config)
            self.delta_sync.start()
        return result

    return initialize_kv_caches


def _trace_as_vllm_does(vllm_config: Any) -> None:
    """With several API servers vLLM's flag does not reach the engine's process: our spans go there all the same."""
    endpoint = getattr(vllm_config.observability_config, "otlp_traces_endpoint", None)
    if endpoint:
        kind = "OTEL_EXPORTER_OTLP_TRACES_"
        for name, value in (("ENDPOINT", endpoint), ("PROTOCOL", "grpc"), ("INSECURE", "true")):  # vLLM's own defaults
            os.environ.setdefault(kind + name, value)


def _build(core: Any, vllm_config: Any, config: Any) -> Any:
    from vllm_delta_plugin.engine_core import DeltaSync, EngineFacts

    model, looped = vllm_config.model_config, _looped(core)
    several = setting(vllm_config, "parallel_config.data_parallel_size") > 1
    several = several or setting(vllm_config, "parallel_config.data_parallel_index") > 0
    # Each engine of a dense model is told that it is alone: the first of several is known by their coordinator.
    several = several or (looped and core.has_coordinator)
    name = model.served_model_name
    facts = EngineFacts(
        model=name[0] if isinstance(name, list) and name else str(name or model.model),
        dtype=str(model.dtype).removeprefix("torch."),
        logprobs_mode=str(model.logprobs_mode),
        engine_index=(core.engine_index if looped else 0) if several else None,
    )
    wake = (lambda: core.input_queue.put_nowait((_TICK, None))) if looped else (lambda: None)
    rpc = executors.call_of(core.model_executor, vllm_config)
    steps = lockstep.Lockstep(core) if lockstep.shares_experts(vllm_config) else None
    return DeltaSync(config, facts, rpc, wake, lambda main, stop: EnginePause(core, main, stop), steps)


def _looped(core: Any) -> bool:
    """Whether the engine has a loop of its own, as all but in-process ones, which are pumped by step()."""
    from vllm.v1.engine.core import EngineCoreProc

    if not isinstance(core, EngineCoreProc):
        return False
    require(core, "input_queue", "engine_index", "has_coordinator")
    return True


def _refuse_unsupported(core: Any, vllm_config: Any, config: Any) -> None:
    from vllm.config import CompilationMode
    from vllm.platforms import current_platform

    executors.check_ordered(type(core.model_executor))
    if lockstep.shares_experts(vllm_config):
        lockstep.refuse_unsupported(core, vllm_config, config.transition)
    stages = setting(vllm_config, "parallel_config.pipeline_parallel_size")
    if stages > 1 and current_platform.is_cpu() and vllm_config.compilation_config.mode == CompilationMode.NONE:
        raise MappingError(
            "pipeline stages on a CPU",
            expected="a model that vLLM compiles, else its worker there fails at the first token (seen in 0.32)",
            got=f"{stages} stages and --enforce-eager",
            remedy="leave --enforce-eager out",
        )
    if config.transition == "sync" and not _looped(core):
        raise MappingError(
            "transition 'sync'",
            expected="an engine with a loop of its own, which goes on while requests end",
            got="one that steps only while LLM.generate runs",
            remedy="use vllm serve, or leave VLLM_ENABLE_V1_MULTIPROCESSING on",
        )
    if not setting(vllm_config, "parallel_config.worker_extension_cls"):
        raise MappingError(
            "worker extension class", expected=WORKER_EXTENSION, got="none", remedy="pass --worker-extension-cls too"
        )


def _salt(original: Callable[..., Any]) -> Callable[..., Any]:
    def preprocess_add_request(self: Any, request: Any) -> Any:
        sync = _of(self)
        if sync is None:
            return original(self, request)
        session = (request.trace_headers or {}).get(SESSION) or getattr(request, "session_id", None)
        salted = sync.salted(request.cache_salt, session)
        request.cache_salt = salted.cache_salt
        if request.mm_features:
            request.mm_features = salted.renamed(request.mm_features)
            salted.release = encoder_cache.releasing(self.scheduler)
        if sync.serves_adapters and request.lora_request is None:
            request.lora_request = adapter_request()
        result = original(self, request)
        setattr(result[0], ATTRIBUTE, salted)
        return result

    return preprocess_add_request


def _ready_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def step(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _of(self):
            batches.label_batches(self.scheduler, self.delta_sync.label, lambda *batch: _returned(self, *batch))
            self.delta_sync.main.pump()
        return original(self, *args, **kwargs)

    return step


def _returned(core: Any, label: str, tokens: bool) -> None:
    _tell_vllm(core, label)
    more = core.scheduler.has_unfinished_requests()
    if tokens:
        core.delta_sync.outputs.returned(more)
    elif not more:
        core.delta_sync.outputs.ended()


def _tell_vllm(core: Any, label: str) -> None:
    """vLLM 0.32 stamps outputs with this where it hands them on, and shows it in ``LLM`` outputs."""
    if hasattr(core, "_weight_version"):
        core._weight_version = label


def _stop_before(original: Callable[..., Any]) -> Callable[..., Any]:
    def shutdown(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _of(self):
            self.delta_sync.stop()
        return original(self, *args, **kwargs)

    return shutdown


def _on_tick(original: Callable[..., Any]) -> Callable[..., Any]:
    def handle_client_request(self: Any, request_type: Any, request: Any) -> Any:
        if request_type == _TICK:
            return delta_sync_pump(self)
        return original(self, request_type, request)

    return handle_client_request
