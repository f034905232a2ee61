"""Which of vLLM's executors are followed, and that those keep steps and calls in one order: with vLLM's own classes."""

from __future__ import annotations

import sys
from collections import deque
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from vllm.v1.executor import ray_utils
from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc
from vllm.v1.executor.ray_executor import RayDistributedExecutor
from vllm.v1.executor.uniproc_executor import ExecutorWithExternalLauncher, UniProcExecutor

from delta_sync.errors import MappingError
from vllm_delta_plugin.compat.executors import call_of, check_ordered

RAY = ("ray", "ray.actor", "ray.types", "ray.util", "ray.util.scheduling_strategies")
SECOND = "vllm.v1.executor.ray_executor_v2"


class Derived(MultiprocExecutor):
    """Somebody's own."""


@pytest.fixture
def second_of_ray(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's module as it is; only what it imports of Ray, which is not installed here, is empty."""
    for name in RAY:
        monkeypatch.setitem(sys.modules, name, MagicMock())
    monkeypatch.setattr(ray_utils, "ray", sys.modules["ray"])
    monkeypatch.delitem(sys.modules, SECOND, raising=False)
    __import__(SECOND)
    module = sys.modules[SECOND]
    monkeypatch.delitem(sys.modules, SECOND)
    return module


def test_executors_that_keep_order_are_followed(second_of_ray: Any) -> None:
    for executor in (UniProcExecutor, MultiprocExecutor, second_of_ray.RayExecutorV2):
        check_ordered(executor)


@pytest.mark.parametrize(
    ("executor", "says"),
    [
        (RayDistributedExecutor, r"RayDistributedExecutor \(its steps go over.*VLLM_USE_RAY_V2_EXECUTOR_BACKEND=0"),
        (ExecutorWithExternalLauncher, r"ExecutorWithExternalLauncher \(each rank is an engine of its own"),
        (Derived, r"got \S*test_executors\.Derived\b"),
        (type("MultiprocExecutor", (MultiprocExecutor,), {"__module__": "own"}), r"got own\.MultiprocExecutor\b"),
    ],
)
def test_all_others_are_refused_by_name(executor: type, says: str) -> None:
    with pytest.raises(
        MappingError, match=rf"distributed executor, expected .*{says}.*use --distributed-exec.*--nnodes"
    ):
        check_ordered(executor)


class Queue(deque[Any]):
    """What vLLM's message queue does for one reader; empty, it ends a worker's loop."""

    enqueue = deque.append

    def dequeue(self, **_: Any) -> Any:
        return self.popleft()


@pytest.mark.parametrize("ray", [False, True])
def test_a_call_comes_between_the_same_steps_on_every_rank(ray: bool, second_of_ray: Any) -> None:
    executor_class, worker_class = (
        (second_of_ray.RayExecutorV2, second_of_ray.RayWorkerProc) if ray else (MultiprocExecutor, WorkerProc)
    )
    executor, sent = object.__new__(executor_class), Queue()
    executor.__dict__ |= {"rpc_broadcast_mq": sent, "response_mqs": [Queue(), Queue()], "futures_queue": deque()}
    executor.__dict__ |= {"is_failed": False, "output_rank": 1, "shutting_down": True}
    executor.kv_output_aggregator = executor.ec_output_aggregator = None
    executor.execute_model("step 1", non_block=True)
    executor.sample_tokens("step 1", non_block=True)
    executor.collective_rpc("delta_sync_commit", args=("version 2",), non_block=True)
    executor.execute_model("step 2", non_block=True)

    for rank in range(2):
        worker, did = object.__new__(worker_class), []
        worker.__dict__ |= {"rank": rank, "use_async_scheduling": False, "worker_response_mq": Queue()}
        names = ("execute_model", "sample_tokens", "delta_sync_commit")
        worker.worker = SimpleNamespace(**{n: lambda what, n=n, did=did: did.append((n, what)) for n in names})
        worker.rpc_broadcast_mq = Queue(sent)
        with pytest.raises(IndexError):
            worker.worker_busy_loop()
        assert did == [
            ("execute_model", "step 1"),
            ("sample_tokens", "step 1"),
            ("delta_sync_commit", "version 2"),
            ("execute_model", "step 2"),
        ]


@pytest.mark.parametrize(("nodes", "ray", "limit"), [(1, False, None), (2, False, 7), (1, True, 7)])
def test_workers_elsewhere_have_a_deadline(
    nodes: int, ray: bool, limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM notices only that a process of this machine has ended: a commit would wait for the others for ever."""
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "7")
    calls: list[tuple[Any, ...]] = []
    executor = SimpleNamespace(uses_ray=ray, collective_rpc=lambda *args, **kwargs: calls.append((*args, kwargs)) or [])
    call = call_of(executor, SimpleNamespace(parallel_config=SimpleNamespace(nnodes=nodes)))
    call("delta_sync_commit", args=(2,))
    call("delta_sync_attach", args=({},))
    assert calls == [
        ("delta_sync_commit", {"timeout": limit, "args": (2,)}),
        ("delta_sync_attach", {"timeout": limit and 10 * limit, "args": ({},)}),
    ]
