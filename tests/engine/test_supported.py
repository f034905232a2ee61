"""What the engine side cannot keep exact is refused at start, by name."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationMode
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.engine_core import _refuse_unsupported
from vllm_delta_plugin.config import ReplicaConfig

SHARED: dict[str, Any] = {"engines": 2, "moe": True, "core": {"has_coordinator": True, "input_queue": None}}


def check(
    engines: int = 1,
    stages: int = 1,
    moe: bool = False,
    extension: str = "x.Y",
    external: bool = False,
    eager: bool = False,
    **more: Any,
) -> None:
    parallel = SimpleNamespace(
        data_parallel_size=engines,
        pipeline_parallel_size=stages,
        worker_extension_cls=extension,
        data_parallel_external_lb=external,
    )
    lora = more.pop("lora", None)
    model = SimpleNamespace(is_moe=moe)
    compiled = SimpleNamespace(mode=CompilationMode.NONE if eager else CompilationMode.VLLM_COMPILE)
    config: Any = SimpleNamespace(
        parallel_config=parallel, model_config=model, lora_config=lora, compilation_config=compiled
    )
    core = SimpleNamespace(model_executor=object.__new__(MultiprocExecutor), **more.pop("core", {}))
    _refuse_unsupported(core, config, ReplicaConfig("memory://", **more))


def test_ordinary_engines_are_followed() -> None:
    check()
    check(moe=True)
    check(engines=2)
    check(transition="sync", core={"input_queue": None})


def test_pipeline_stages_are_followed_where_vllm_can_run_them(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    check(stages=2, eager=True)
    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: True)
    check(stages=2)
    check(eager=True)
    with pytest.raises(MappingError, match=r"pipeline stages on a CPU.*got 2 stages and --enforce-eager.*leave"):
        check(stages=2, eager=True)


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ({**SHARED, "transition": "sync"}, "transition 'sync' of engines that share experts"),
        ({**SHARED, "lora": object()}, "LoRA adapters on engines that share experts"),
        ({**SHARED, "external": True}, "behind several API servers"),
        ({**SHARED, "core": {"has_coordinator": False}}, "without vLLM's own coordinator"),
        (SHARED, "engines that share experts on a CPU"),
        ({"extension": ""}, "worker extension"),
        ({"transition": "sync"}, "transition 'sync'"),
    ],
)
def test_others_are_refused_by_name(setting: dict[str, Any], names: str) -> None:
    with pytest.raises(MappingError, match=names):
        check(**setting)
