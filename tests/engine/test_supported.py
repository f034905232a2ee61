"""What the engine side cannot keep exact is refused at start, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode, ParallelConfig
from vllm.v1.engine.core import EngineCore, EngineCoreProc
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.engine_core import _refuse_unsupported
from vllm_delta_plugin.compat.seam import SeamError
from vllm_delta_plugin.config import ReplicaConfig

SHARED: dict[str, Any] = {"data_parallel_size": 2, "moe": True, "looped": True}


def check(
    moe: bool = False,
    lora: object = None,
    eager: bool = False,
    looped: bool = False,
    coordinator: bool = True,
    transition: str = "async",
    without: str = "",
    **settings: Any,
) -> None:
    """Of an engine with these settings of vLLM's own class, in which all of them must be; ``without`` an attribute."""
    parallel = ParallelConfig()
    for name, value in {"worker_extension_cls": "x.Y", **settings}.items():
        assert hasattr(parallel, name)
        setattr(parallel, name, value)
    model = SimpleNamespace(is_moe=moe)
    compiled = SimpleNamespace(mode=CompilationMode.NONE if eager else CompilationMode.VLLM_COMPILE)
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=model, lora_config=lora, compilation_config=compiled
    )
    core: Any = object.__new__(EngineCoreProc if looped else EngineCore)
    vars(core).update(model_executor=object.__new__(MultiprocExecutor))
    if looped:
        vars(core).update(input_queue=None, engine_index=0, has_coordinator=coordinator)
    with pytest.MonkeyPatch.context() as patch:
        if without:
            owner = core if without in vars(core) else parallel
            patch.delattr(owner, without)
            patch.delattr(type(owner), without, raising=False)  # where a field's default stays behind
        _refuse_unsupported(core, config, ReplicaConfig("memory://", transition=transition))


def test_ordinary_engines_are_followed() -> None:
    check()
    check(moe=True)
    check(data_parallel_size=2)
    check(transition="sync", looped=True)


def test_pipeline_stages_are_followed_where_vllm_can_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    check(pipeline_parallel_size=2, eager=True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    check(pipeline_parallel_size=2)
    check(eager=True)
    with pytest.raises(MappingError, match=r"pipeline stages on a CPU.*got 2 stages and --enforce-eager.*leave"):
        check(pipeline_parallel_size=2, eager=True)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({**SHARED, "transition": "sync"}, "transition 'sync' of engines that share experts"),
        ({**SHARED, "lora": object()}, "LoRA adapters on engines that share experts"),
        ({**SHARED, "data_parallel_external_lb": True}, "behind several API servers"),
        ({**SHARED, "data_parallel_hybrid_lb": True}, "behind several API servers"),
        ({**SHARED, "enable_elastic_ep": True}, "elastic expert parallelism"),
        ({**SHARED, "coordinator": False}, "without vLLM's own coordinator"),
        (SHARED, "engines that share experts on a CPU"),
        ({"worker_extension_cls": ""}, "worker extension"),
        ({"transition": "sync"}, "transition 'sync'"),
    ],
)
def test_others_are_refused_by_name(setting: dict[str, Any], names: str) -> None:
    with pytest.raises(MappingError, match=names):
        check(**setting)


@pytest.mark.parametrize(
    ("setting", "name"),
    [
        ({}, "data_parallel_size"),
        ({}, "pipeline_parallel_size"),
        ({}, "worker_extension_cls"),
        (SHARED, "enable_elastic_ep"),
        (SHARED, "data_parallel_external_lb"),
        (SHARED, "data_parallel_hybrid_lb"),
        ({"looped": True, "transition": "sync"}, "input_queue"),
        ({"looped": True, "transition": "sync"}, "has_coordinator"),
    ],
)
def test_what_vllm_renamed_is_named_and_not_taken_for_off(setting: dict[str, Any], name: str) -> None:
    with pytest.raises(SeamError, match=rf"vLLM seam vllm\..*\.{name}, expected there"):
        check(**setting, without=name)
