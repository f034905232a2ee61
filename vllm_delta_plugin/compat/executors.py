"""Seam: the executor, which hands steps and calls to the workers. A commit needs the same order of both on every rank.

Named are classes, not their bases: a subclass may hand steps over another way, and would look the same from here.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.seam import require
from vllm_delta_plugin.compat.settings_seam import setting

_PACKAGE = "vllm.v1.executor."
# Steps and calls go into one queue to all workers, also over several machines, and each takes them in one loop. The
# second of Ray's executors inherits both from the first of these; a worker in the engine's process needs no queue.
_ORDERED = ("multiproc_executor.MultiprocExecutor", "ray_executor_v2.RayExecutorV2", "uniproc_executor.UniProcExecutor")
_WHY_NOT = {
    "ray_executor.RayDistributedExecutor": "its steps go over a compiled graph and its calls do not: neither waits for "
    "the other. It is what ray means with VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0",
    "uniproc_executor.ExecutorWithExternalLauncher": "each rank is an engine of its own that knows of no other, and "
    "would commit whenever it has staged",
}
_START, _STEPS = "delta_sync_attach", 10  # reads all weights once: it may take as long as so many steps


def check_ordered(executor: type) -> None:
    """MappingError unless this very class is known to keep steps and calls in one order on every rank."""
    name = f"{executor.__module__}.{executor.__qualname__}"
    if name in {_PACKAGE + ordered for ordered in _ORDERED}:
        return
    known = " or ".join(ordered.rpartition(".")[2] for ordered in _ORDERED)
    raise MappingError(
        "distributed executor",
        expected=f"vLLM's own {known}, whose workers take steps and calls in one order",
        got=f"{name} ({why})" if (why := _WHY_NOT.get(name.removeprefix(_PACKAGE))) else name,
        remedy="use --distributed-executor-backend mp, over several machines with --nnodes",
    )


def call_of(executor: Any, vllm_config: Any) -> Callable[[str, Sequence[Any]], Sequence[Any]]:
    """How to call all workers. Those of other machines, which vLLM does not watch, must answer as soon as a step must.

    The TimeoutError of one that does not leaves replies out of step for good: the engine has to end with it.
    """
    from vllm import envs

    require(executor, "uses_ray")
    watched = setting(vllm_config, "parallel_config.nnodes") == 1 and not executor.uses_ray
    limit = None if watched else envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

    def call(method: str, args: Sequence[Any]) -> Sequence[Any]:
        seconds = _STEPS * limit if limit and method == _START else limit
        replies: Sequence[Any] = executor.collective_rpc(method, timeout=seconds, args=tuple(args))
        return replies

    return call
